--@use base prompts suspects queue life
-- Removes a worker that shuts down and gives back all that it held.
-- ARGV: limits, worker, then per suspect (a request that may be why the worker ends): id, attempt
-- Returns {requeued, lost, dead}: what published nothing is queued as the same attempt; the rest becomes AttemptLost.
-- Guarantees: attempts of suspects count as failed, and end at the cap of attempts.
local worker, requeued, lost, dead, suspects = ARGV[2], 0, 0, 0, {}
for i = 3, #ARGV, 2 do suspects[ARGV[i]] = tonumber(ARGV[i + 1]) end
for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. worker)) do
  local r = load_record(id)
  if r and r.state == 'running' and r.holder == worker then
    if suspects[id] == r.attempt then
      if lose(r, 'worker gave up', 1) == 'dead' then dead = dead + 1 else lost = lost + 1 end
    elseif r.streamed == '' then
      requeue(r)
      requeued = requeued + 1
    else
      lose(r, 'worker left', 0)
      lost = lost + 1
    end
  end
end
remove_worker(worker)
rebalance_undone()
wake()
return { requeued, lost, dead }
