--@use base
-- Lists workers by what they noted of their sleep. Removes nothing: whoever looks may only be allowed to read.
-- ARGV: limits
-- Returns {level that is ordered (0: be awake), {worker, state, ...} of notes under lease, how many workers and seats
-- under lease have none: they do not follow}. States are those of
-- note_sleep.lua.
local notes, noted, silent, flat = {}, {}, 0, redis.call('HGETALL', P .. 'sleepers')
for i = 1, #flat, 2 do
  local state, lease_end = string.match(flat[i + 1], ' (%-?%d) (%d+)$')
  if state and tonumber(lease_end) >= NOW then
    notes[#notes + 1], notes[#notes + 2] = flat[i], state
    noted[flat[i]] = true
  end
end
for _, members in ipairs({ 'workers', 'seats' }) do
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. members, NOW, '+inf')) do
    if not noted[worker] then silent = silent + 1 end
  end
end
return { tonumber(redis.call('GET', P .. 'sleep')) or 0, notes, silent }
