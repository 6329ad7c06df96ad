--@use base
-- Lists the groups that seats were assigned.
-- ARGV: limits
-- Returns {group, ...}, one per seat that has any, by seat number.
local answer = {}
for _, worker in ipairs(redis.call('ZRANGE', P .. 'seat_numbers', 0, -1)) do
  answer[#answer + 1] = redis.call('HGET', P .. 'seat:' .. worker, 'assignment') or nil
end
return answer
