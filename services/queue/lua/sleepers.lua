--@use base
-- Lists who sleeps. Removes nothing: whoever looks may only be allowed to read.
-- ARGV: limits
-- Returns {level that is ordered (0: be awake), {worker, state, ...} of notes under lease, {live workers without such a
-- note, ...}}. States are those of note_sleep.lua.
local notes, awake, flat = {}, {}, redis.call('HGETALL', P .. 'sleepers')
local noted = {}
for i = 1, #flat, 2 do
  local state, lease_end = string.match(flat[i + 1], '^(%-?%d) (%d+)$')
  if state and tonumber(lease_end) >= NOW then
    notes[#notes + 1], notes[#notes + 2], noted[flat[i]] = flat[i], state, true
  end
end
for _, kind in ipairs({ 'workers', 'seats' }) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. kind, NOW, '+inf')) do
    if not noted[id] then awake[#awake + 1] = id end
  end
end
return { tonumber(redis.call('GET', P .. 'sleep')) or 0, notes, awake }
