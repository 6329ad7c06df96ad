-- Library (needs base): what members of a namespace must agree in, while they live: the model that they serve, and a
-- version of what they write to one another. wires are the ranges of versions that members read, such as 1-2;
-- wire:<range> lives as long as any of these does and names its release. (The release before version 2 tells none; it reads 1-1.)
-- What a member claimed itself less than two leases ago cannot have run out, so nobody can have claimed anything else since:
-- another value was put there by somebody who is no member, or means harm. The member puts its own back and goes on.
local MAX_RANGES = 16

-- What a key says, as far as members write anything so long; nil where it says nothing or is of another type.
local function value_of(key)
  local value = redis.pcall('GETRANGE', key, 0, 255)
  return type(value) == 'string' and value ~= '' and value or nil
end

local function disagreement(kind, ...)
  local words = { ... }
  for i, word in ipairs(words) do words[i] = string.gsub(word, '[^%w%.+-]', '?') end
  return redis.error_reply(kind .. ' ' .. table.concat(words, ' '))
end

local function note(what)
  redis.log(redis.LOG_WARNING, 'expertmesh: ' .. P .. ': ' .. what .. ' was written by no member and is put right')
end

local function ranges()
  local count = redis.pcall('SCARD', P .. 'wires')
  if type(count) == 'number' and count <= MAX_RANGES then return redis.call('SMEMBERS', P .. 'wires') end
  note('wires') -- members put their ranges back
  redis.call('UNLINK', P .. 'wires')
  return {}
end

-- An error reply where live members read nothing that this one writes, or the other way round. good_until: end of what it
-- claimed before, 0 for a first claim.
local function claim_wire(lease_ms, good_until)
  local mine = C.oldest_wire .. '-' .. C.wire
  for _, range in ipairs(ranges()) do
    local oldest, newest = string.match(range, '^(%d+)-(%d+)$')
    local release = value_of(P .. 'wire:' .. range)
    local disjoint = oldest and (tonumber(oldest) > C.wire or tonumber(newest) < C.oldest_wire)
    if release and disjoint and good_until <= NOW then return disagreement('WIRE', release, range) end
    if release and disjoint then note('a range of versions') end
    if not release or not oldest or disjoint then redis.call('SREM', P .. 'wires', range) end
  end
  redis.call('SADD', P .. 'wires', mine)
  redis.call('SET', P .. 'wire:' .. mine, C.release, 'PX', 2 * lease_ms)
end

-- An error reply where live members serve another model than fingerprint ('' claims nothing), or see claim_wire.
local function claim_model(fingerprint, lease_ms, good_until)
  local mismatch = claim_wire(lease_ms, good_until)
  if mismatch or fingerprint == '' then return mismatch end
  local served = value_of(P .. 'model')
  if served and served ~= fingerprint and good_until <= NOW then return disagreement('FINGERPRINT', served) end
  if served and served ~= fingerprint then note('model') end
  redis.call('SET', P .. 'model', fingerprint, 'PX', 2 * lease_ms)
end

-- End of what a member claimed with its last heartbeat; 0 for one that is not in the index of leases.
local function claimed_until(index, member, own_lease_ms, lease_ms)
  local lease_end = tonumber(redis.call('ZSCORE', P .. index, member))
  return lease_end and lease_end - own_lease_ms + 2 * lease_ms or 0
end
