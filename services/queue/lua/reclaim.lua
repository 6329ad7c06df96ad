-- Library (needs base): the hold on reclaiming leases.
local function hold(ms)
  local key = P .. 'reclaim_after'
  local current = tonumber(redis.call('GET', key)) or 0
  if NOW + ms > current then redis.call('SET', key, NOW + ms, 'PX', ms + 1000) end
end

-- True while leases must not be reclaimed. A server that restarted starts a hold of its own accord: while it was away
-- nobody could renew a lease.
local function on_hold()
  local key = P .. 'run_id'
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local seen = redis.call('GET', key)
  if seen ~= run_id then
    redis.call('SET', key, run_id)
    if seen then hold(C.lease_ms) end
  end
  extend(key, 86400000)
  return (tonumber(redis.call('GET', P .. 'reclaim_after')) or 0) > NOW
end
