--@use base
-- Lists workers by what they noted of their sleep. Removes nothing: whoever looks may only be allowed to read.
-- ARGV: limits
-- Returns {level that is ordered (0: be awake), {worker, state, ...} of notes under lease}. States are those of
-- note_sleep.lua.
local notes, flat = {}, redis.call('HGETALL', P .. 'sleepers')
for i = 1, #flat, 2 do
  local state, lease_end = string.match(flat[i + 1], ' (%-?%d) (%d+)$')
  if state and tonumber(lease_end) >= NOW then notes[#notes + 1], notes[#notes + 2] = flat[i], state end
end
return { tonumber(redis.call('GET', P .. 'sleep')) or 0, notes }
