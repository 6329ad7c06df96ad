--@use base prompts suspects queue life
-- Takes back what a worker that drains has not begun to answer.
-- ARGV: limits, worker
-- Returns the ids that went back to their places, each as the same attempt.
local answer = {}
for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. ARGV[2])) do
  local r = load_record(id)
  if r and r.state == 'running' and r.holder == ARGV[2] and r.streamed == '' then
    requeue(r)
    answer[#answer + 1] = id
  end
end
rebalance_undone()
if #answer > 0 then wake() end
return answer
