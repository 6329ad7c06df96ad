--@use base
-- Notes, under a lease, how deeply a worker sleeps, and answers with what is ordered.
-- ARGV: limits, worker, its kind (attention or experts), its state (0: awake, 1 or 2: asleep at that level, -1: on its
-- way), lease ms, 1: count the attention workers that do not sleep yet
-- Returns {level that is ordered (0: be awake), that count (0 if it was not asked for)}.
local sleepers, level, awake = P .. 'sleepers', tonumber(redis.call('GET', P .. 'sleep')) or 0, 0
redis.call('HSET', sleepers, ARGV[2], string.format('%s %s %.0f', ARGV[3], ARGV[4], NOW + ARGV[5]))
if ARGV[6] == '1' and level > 0 then
  for _, note in ipairs(redis.call('HVALS', sleepers)) do
    local state, lease_end = string.match(note, '^attention (%-?%d) (%d+)$')
    if state and tonumber(lease_end) >= NOW and tonumber(state) < 1 then awake = awake + 1 end
  end
end
return { level, awake }
