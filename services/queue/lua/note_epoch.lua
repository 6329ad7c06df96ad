--@use base seat
-- Notes under a lease the oldest epoch of the table that an attention worker may still use.
-- ARGV: limits, worker, lease ms, epoch
-- Returns the epoch of the table that is published (0: none).
redis.call('ZADD', P .. 'table_readers', NOW + tonumber(ARGV[3]), ARGV[2])
redis.call('ZADD', P .. 'table_epochs', ARGV[4], ARGV[2])
return published()
