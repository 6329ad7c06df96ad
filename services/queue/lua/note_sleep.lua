--@use base
-- Notes, under a lease, how deeply a worker sleeps, and answers with what is ordered.
-- ARGV: limits, worker, its state (0: awake, 1 or 2: asleep at that level, -1: on its way), lease ms,
-- 1: count the attention workers that do not sleep yet
-- Returns {level that is ordered (0: be awake), that count (0 if it was not asked for)}.
local sleepers, worker = P .. 'sleepers', ARGV[2]
if ARGV[3] == '0' then
  redis.call('HDEL', sleepers, worker)
else
  redis.call('HSET', sleepers, worker, ARGV[3] .. ' ' .. string.format('%.0f', NOW + ARGV[4]))
end
local level, awake = tonumber(redis.call('GET', P .. 'sleep')) or 0, 0
if ARGV[5] == '1' and level > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', NOW, '+inf')) do
    local state = redis.call('HGET', sleepers, id)
    if not state or string.sub(state, 1, 1) == '-' then awake = awake + 1 end
  end
end
return { level, awake }
