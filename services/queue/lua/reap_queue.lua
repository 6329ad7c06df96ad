--@use base prompts suspects queue life
-- Ends queued requests whose deadline passed, and puts claims of older epochs back.
-- ARGV: limits, epoch, most items of each kind
-- Returns {expired, requeued, 1 if more is left, what became of requests (see life.lua)}.
-- Guarantees: safe at any time, since an older epoch can assign nothing.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local limit, expired, requeued = tonumber(ARGV[3]), 0, 0
local late = redis.call('ZRANGEBYSCORE', P .. 'deadlines', '-inf', NOW, 'LIMIT', 0, limit)
for _, id in ipairs(late) do
  local r = load_record(id)
  redis.call('ZREM', P .. 'deadlines', id)
  if r and r.state == 'queued' then
    fail(r, C.expired)
    note_fate('expired', r, r.attempt, '')
    expired = expired + 1
  end
end
local old = redis.call('ZRANGEBYSCORE', P .. 'claims', '-inf', '(' .. ARGV[2], 'LIMIT', 0, limit)
for _, id in ipairs(old) do
  local r = load_record(id)
  redis.call('ZREM', P .. 'claims', id)
  if r and r.state == 'claimed' then
    requeue(r)
    requeued = requeued + 1
  end
end
redis.call('ZREMRANGEBYSCORE', P .. 'dead', '-inf', NOW - C.dead_ms)
rebalance_undone()
if requeued > 0 then wake() end
return { expired, requeued, (#late == limit or #old == limit) and 1 or 0, fates }
