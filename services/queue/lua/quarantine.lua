--@use base
-- Keeps something that could not be read, for an operator to look at: at most so many of the newest.
-- ARGV: limits, what it is and why (JSON)
-- Returns OK.
redis.call('LPUSH', P .. 'unreadable', string.format('%.0f', NOW) .. ':' .. ARGV[2])
redis.call('LTRIM', P .. 'unreadable', 0, C.max_unreadable - 1)
redis.call('PEXPIRE', P .. 'unreadable', C.dead_ms)
return redis.status_reply('OK')
