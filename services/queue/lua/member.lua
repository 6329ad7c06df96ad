-- Library (needs base): what members of a namespace must agree in, while they live: the model that they serve, and a
-- version of what they write to one another. wires are the ranges of versions that members read, such as 1-2;
-- wire:<range> lives as long as any of these does and names its release. (The release before version 2 tells none; it reads 1-1.)

-- An error reply where live members read nothing that this one writes, or the other way round.
local function claim_wire(lease_ms)
  local mine = C.oldest_wire .. '-' .. C.wire
  for _, range in ipairs(redis.call('SMEMBERS', P .. 'wires')) do
    local oldest, newest = string.match(range, '^(%d+)-(%d+)$')
    local release = redis.call('GET', P .. 'wire:' .. range)
    if not release or not oldest then
      redis.call('SREM', P .. 'wires', range)
    elseif tonumber(oldest) > C.wire or tonumber(newest) < C.oldest_wire then
      return redis.error_reply('WIRE ' .. release .. ' ' .. range)
    end
  end
  redis.call('SADD', P .. 'wires', mine)
  redis.call('SET', P .. 'wire:' .. mine, C.release, 'PX', 2 * lease_ms)
end

-- An error reply where live members serve another model than fingerprint ('' claims nothing), or see claim_wire.
local function claim_model(fingerprint, lease_ms)
  local mismatch = claim_wire(lease_ms)
  if mismatch or fingerprint == '' then return mismatch end
  local served = redis.call('GET', P .. 'model')
  if served and served ~= fingerprint then return redis.error_reply('FINGERPRINT ' .. served) end
  redis.call('SET', P .. 'model', fingerprint, 'PX', 2 * lease_ms)
end
