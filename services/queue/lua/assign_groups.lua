--@use base seat
-- Assigns groups to seats; their workers learn of it with their next heartbeats.
-- ARGV: limits, epoch, (worker, digest of the group, the group)...
-- Returns {1, or 0 if the seat is gone or leaves, ...}.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local answer = {}
for i = 3, #ARGV, 3 do
  local worker, key = ARGV[i], P .. 'seat:' .. ARGV[i]
  local stays = seated(worker) and redis.call('HGET', key, 'status') ~= 'leaving'
  if stays then
    redis.call('HSET', key, 'digest', ARGV[i + 1], 'assignment', ARGV[i + 2])
    changed(worker)
  end
  answer[#answer + 1] = stays and 1 or 0
end
return answer
