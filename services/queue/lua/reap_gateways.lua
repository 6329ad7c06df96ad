--@use base prompts suspects queue life reclaim
-- Cancels the requests of gateways whose lease expired.
-- ARGV: limits, epoch, most requests
-- Returns {gateways removed, requests cancelled, 1 if more is left}. On hold nothing happens.
-- Guarantees: the result stream ends with their 'cancelled' and expires. A gateway that was slow rather than dead takes
-- that for a lost attempt (resync).
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 0, 0, 0 } end
local left, removed, cancelled = tonumber(ARGV[3]), 0, 0
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', P .. 'gateways', '-inf', NOW, 'LIMIT', 0, left)) do
  local owned = P .. 'owned:' .. gateway
  for _, id in ipairs(redis.call('SRANDMEMBER', owned, left)) do
    left = left - 1
    local r = load_record(id)
    if r and r.state ~= 'done' and r.reply_to == gateway then
      send_end(r, 'cancelled')
      cancel(r, 0)
      cancelled = cancelled + 1
    end
    redis.call('SREM', owned, id)
  end
  if redis.call('EXISTS', owned) == 0 then
    redis.call('ZREM', P .. 'gateways', gateway)
    redis.call('PEXPIRE', P .. 'results:' .. gateway, C.tombstone_ms)
    removed = removed + 1
  end
  if left <= 0 then break end
end
return { removed, cancelled, left <= 0 and 1 or 0 }
