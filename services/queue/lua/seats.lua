--@use base
-- Lists the seats that were not reaped. An expired lease does not end a seat: Redis may have been away.
-- ARGV: limits
-- Returns {{number, info, status, report ('': none yet), 1 if dismissed, digest of its assignment ('': none)}, ...},
-- by number.
local answer = {}
local flat = redis.call('ZRANGE', P .. 'seat_numbers', 0, -1, 'WITHSCORES')
for i = 1, #flat, 2 do
  local v = redis.call('HMGET', P .. 'seat:' .. flat[i], 'info', 'status', 'report', 'dismissed', 'digest')
  if v[1] then
    answer[#answer + 1] = { tonumber(flat[i + 1]), v[1], v[2], v[3] or '', v[4] and 1 or 0, v[5] or '' }
  end
end
return answer
