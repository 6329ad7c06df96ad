-- Library (needs base): what live members of a namespace must agree in: the model that they serve, and a version of
-- what they write to one another. wires has the ranges of versions that members read, such as 1-2; wire:<range> lives
-- as long as any member of that range does, and names its release. (The release before version 2 writes no range; it
-- reads 1-1.) What a member claimed less than two leases ago cannot have expired, so no member can have claimed
-- anything else since: another value was written by an intruder or by mistake. The member puts its own back and goes
-- on.
local MAX_RANGES = 16

-- The value of a key, up to the longest that members write; nil where it is empty or of another type.
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

-- Claims the range of versions that this member reads; an error reply where live members read nothing that it writes,
-- or the other way round. good_until: when its former claim expires, 0 for a first claim.
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

-- Claims the model, too; an error reply where live members serve another one. claim is its fingerprint ('' claims
-- none); that of a worker which knows the hash of its weights goes on with a slash and that hash. The key weights holds
-- it: members that claim a fingerprint alone, as gateways and the release before do, agree with any.
local function claim_model(claim, lease_ms, good_until)
  local mismatch = claim_wire(lease_ms, good_until)
  if mismatch or claim == '' then return mismatch end
  local mine = {}
  mine.model, mine.weights = string.match(claim, '^([^/]*)/?(.*)$')
  if mine.weights == '' then mine.weights = nil end
  local names = { model = P .. 'model', weights = P .. 'weights' }
  for _, key in ipairs({ 'model', 'weights' }) do
    local served = mine[key] and value_of(names[key])
    if served and served ~= mine[key] and good_until <= NOW then return disagreement('FINGERPRINT', served, key, mine[key]) end
    if served and served ~= mine[key] then note(key) end
  end
  for key, value in pairs(mine) do redis.call('SET', names[key], value, 'PX', 2 * lease_ms) end
end

-- When the claim of a member's last heartbeat expires: two leases after it; 0 for one that has no lease.
local function claimed_until(index, member, lease_ms)
  local lease_end = tonumber(redis.call('ZSCORE', P .. index, member))
  return lease_end and lease_end + lease_ms or 0
end
