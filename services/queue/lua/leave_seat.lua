--@use base seat
-- Marks a seat as leaving: it gets no further assignment, and the next table shall do without it.
-- ARGV: limits, worker
-- Returns 1, or 0 if the worker has no seat (any more).
if not seated(ARGV[2]) then return 0 end
redis.call('HSET', P .. 'seat:' .. ARGV[2], 'status', 'leaving')
changed(ARGV[2])
wake()
return 1
