--@use base prompts suspects queue life reclaim
-- Takes back requests whose lease expired: from workers that went silent about them, from a leader that forgot them,
-- and from gateways that did not resubmit a lost attempt.
-- ARGV: limits, epoch, most items
-- Returns {on hold, requeued, lost, dead, abandoned, 1 if more is left, what became of requests (see life.lua)}. On hold
-- nothing happens.
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 1, 0, 0, 0, 0, 0, {} } end
local count = { requeued = 0, lost = 0, dead = 0, abandoned = 0 }
local ids = redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', NOW, 'LIMIT', 0, tonumber(ARGV[3]))
for _, id in ipairs(ids) do
  local r = load_record(id)
  redis.call('ZREM', P .. 'leases', id)
  local outcome
  if r and r.state == 'claimed' then
    requeue(r)
    outcome = 'requeued'
  elseif r and r.state == 'running' then
    outcome = lose(r, 'lease expired', 1)
  elseif r and r.state == 'lost' then
    fail(r, C.abandoned)
    note_fate('abandoned', r, r.attempt, '')
    outcome = 'abandoned'
  end
  if outcome then count[outcome] = count[outcome] + 1 end
end
rebalance_undone()
if count.requeued > 0 then wake() end
local more = #ids == tonumber(ARGV[3]) and 1 or 0
return { 0, count.requeued, count.lost, count.dead, count.abandoned, more, fates }
