--@use base
-- Lists the rows that seats counted.
-- ARGV: limits
-- Returns {number, rows, number, rows, ...} of the seats that reported any.
local answer = {}
local flat = redis.call('ZRANGE', P .. 'seat_numbers', 0, -1, 'WITHSCORES')
for i = 1, #flat, 2 do
  local rows = redis.call('HGET', P .. 'seat:' .. flat[i], 'rows')
  if rows then
    answer[#answer + 1] = tonumber(flat[i + 1])
    answer[#answer + 1] = rows
  end
end
return answer
