--@use base prompts suspects queue life reclaim
-- Cancels the requests of gateways whose lease expired.
-- ARGV: limits, epoch, most requests
-- Returns {gateways removed, requests cancelled, 1 if more is left, what became of requests (see life.lua)}. On hold
-- nothing happens.
-- Guarantees: the result stream ends with 'cancelled' for each request, and expires. A gateway that was slow rather
-- than dead takes that for a lost attempt (resync).
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 0, 0, 0, {} } end
local left, removed, cancelled = tonumber(ARGV[3]), 0, 0
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', P .. 'gateways', '-inf', NOW, 'LIMIT', 0, left)) do
  local owned = P .. 'owned:' .. gateway
  local members = redis.call('SRANDMEMBER', owned, math.min(left, 1000)) -- as many ends fit one entry
  left = left - #members
  local live, entry = {}, {}
  for _, id in ipairs(members) do
    local r = load_record(id)
    if r and r.state ~= 'done' and r.reply_to == gateway then
      live[#live + 1] = r
      entry[#entry + 1] = id
      entry[#entry + 1] = encode_end(r, 'cancelled')
    end
  end
  if #entry > 0 then append_results(gateway, unpack(entry)) end
  for _, r in ipairs(live) do
    cancel(r, 0)
    note_fate('cancelled', r, r.attempt, r.state == 'running' and r.holder or '')
  end
  for _, id in ipairs(members) do redis.call('SREM', owned, id) end
  cancelled = cancelled + #live
  if redis.call('EXISTS', owned) == 0 then
    redis.call('ZREM', P .. 'gateways', gateway)
    redis.call('PEXPIRE', P .. 'results:' .. gateway, C.tombstone_ms)
    removed = removed + 1
  end
  if left <= 0 then break end
end
return { removed, cancelled, left <= 0 and 1 or 0, fates }
