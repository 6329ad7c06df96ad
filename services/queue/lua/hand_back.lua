--@use base prompts suspects queue life
-- Takes back what a worker that drains has not begun to answer, or all that it holds, since it goes to sleep.
-- ARGV: limits, worker, 1 to take all
-- Returns the ids that the worker holds no more. What published nothing went back to its place, as the same attempt; the
-- rest becomes AttemptLost, which does not count as a failure.
local answer = {}
for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. ARGV[2])) do
  local r = load_record(id)
  if r and r.state == 'running' and r.holder == ARGV[2] and (r.streamed == '' or ARGV[3] == '1') then
    if r.streamed == '' then requeue(r) else lose(r, 'worker sleeps', 0) end
    answer[#answer + 1] = id
  end
end
rebalance_undone()
if #answer > 0 then wake() end
return answer
