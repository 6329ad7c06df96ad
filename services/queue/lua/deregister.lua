--@use base queue life
-- Removes a worker that shuts down and gives back all that it held.
-- ARGV: limits, worker
-- Returns {requeued, lost}: what published nothing is queued as the same attempt; the rest becomes AttemptLost.
local worker, requeued, lost = ARGV[2], 0, 0
for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. worker)) do
  local r = load_record(id)
  if r and r.state == 'running' and r.holder == worker then
    if r.streamed == '' then
      requeue(r)
      requeued = requeued + 1
    else
      lose(r, 'worker left', 0)
      lost = lost + 1
    end
  end
end
redis.call('ZREM', P .. 'workers', worker)
redis.call('DEL', P .. 'worker:' .. worker, P .. 'held:' .. worker, P .. 'inbox:' .. worker)
settle_undone()
wake()
return { requeued, lost }
