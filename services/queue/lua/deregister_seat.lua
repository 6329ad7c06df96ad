--@use base seat
-- Removes the seat of a worker that shuts down. Its number is not given out again.
-- ARGV: limits, worker
-- Returns OK.
remove_seat(ARGV[2])
wake()
return redis.status_reply('OK')
