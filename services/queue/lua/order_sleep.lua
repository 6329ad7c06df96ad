--@use base
-- Orders all workers of a namespace to sleep, or to wake up.
-- ARGV: limits, level of the sleep (0: wake up)
-- Returns the level that holds now.
-- Guarantees: a model that sleeps at a level does not sleep less deeply at a lower one.
local level, before = tonumber(ARGV[2]), tonumber(redis.call('GET', P .. 'sleep')) or 0
if level == 0 then
  redis.call('DEL', P .. 'sleep')
elseif level > before then
  redis.call('SET', P .. 'sleep', level)
end
for _, worker in ipairs(redis.call('HKEYS', P .. 'sleepers')) do -- notes of workers that died
  local lease_end = string.match(redis.call('HGET', P .. 'sleepers', worker), ' (%d+)$')
  if not lease_end or tonumber(lease_end) < NOW then redis.call('HDEL', P .. 'sleepers', worker) end
end
return level == 0 and 0 or math.max(level, before)
