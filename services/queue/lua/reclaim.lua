-- Library (needs base): the hold on reclaiming leases.

-- End of the hold, 0 for none. No member asks for more than two leases, so a longer hold is cut to that.
local function held_until()
  local value = redis.pcall('GET', P .. 'reclaim_after')
  local held, latest = type(value) == 'string' and tonumber(value) or 0, NOW + 2 * C.lease_ms
  if held <= latest then return held end
  redis.call('SET', P .. 'reclaim_after', latest, 'PX', 2 * C.lease_ms)
  return latest
end

local function hold(ms)
  local key = P .. 'reclaim_after'
  local current = held_until()
  if NOW + ms > current then redis.call('SET', key, NOW + ms, 'PX', ms + 1000) end
end

local DAY_MS = 86400000

-- True while leases must not be reclaimed. A server that restarted, or stood still for so long that leases expired
-- (then no leader seems to have asked), starts a hold by itself: nobody could renew a lease meanwhile.
local function on_hold()
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local v = redis.call('MGET', P .. 'run_id', P .. 'asked')
  redis.call('SET', P .. 'run_id', run_id, 'PX', DAY_MS)
  redis.call('SET', P .. 'asked', NOW, 'PX', DAY_MS)
  local restarted = v[1] and v[1] ~= run_id
  if restarted or NOW - (tonumber(v[2]) or NOW) > C.lease_ms * 2 / 3 then hold(C.lease_ms) end
  return held_until() > NOW
end
