--@use base seat
-- Tells seats which group to hold; their workers hear it with their next heartbeats.
-- ARGV: limits, epoch, (worker, digest of the group, the group)...
-- Returns {1, or 0 if the seat is gone or leaves, ...}.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local answer = {}
for i = 3, #ARGV, 3 do
  local worker, key = ARGV[i], P .. 'seat:' .. ARGV[i]
  local seated_now = seated(worker) and redis.call('HGET', key, 'status') ~= 'leaving'
  if seated_now then
    redis.call('HSET', key, 'digest', ARGV[i + 1], 'assignment', ARGV[i + 2])
    changed(worker)
  end
  answer[#answer + 1] = seated_now and 1 or 0
end
return answer
