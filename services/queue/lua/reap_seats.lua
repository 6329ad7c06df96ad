--@use base reclaim seat
-- Removes seats, and readers of the table, whose lease expired.
-- ARGV: limits, epoch, most of each kind
-- Returns {on hold, 1 if more is left, readers removed, number of each seat removed ...}. On hold nothing happens.
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 1, 0, 0 } end
local limit = tonumber(ARGV[3])
local readers = redis.call('ZRANGEBYSCORE', P .. 'table_readers', '-inf', NOW, 'LIMIT', 0, limit)
local workers = redis.call('ZRANGEBYSCORE', P .. 'seats', '-inf', NOW, 'LIMIT', 0, limit)
for _, worker in ipairs(readers) do remove_reader(worker) end
local answer = { 0, (#readers == limit or #workers == limit) and 1 or 0, #readers }
for _, worker in ipairs(workers) do
  answer[#answer + 1] = tonumber(redis.call('ZSCORE', P .. 'seat_numbers', worker))
  remove_seat(worker)
end
return answer
