--@use base seat
-- Removes an attention worker that uses no table any more.
-- ARGV: limits, worker
-- Returns OK.
remove_reader(ARGV[2])
return redis.status_reply('OK')
