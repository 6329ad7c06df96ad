--@use base
-- Keeps a message that could not be read, for an operator to look at: the newest C.max_unreadable of them.
-- ARGV: limits, the message and the reason (JSON)
-- Returns OK.
redis.call('LPUSH', P .. 'unreadable', string.format('%.0f', NOW) .. ':' .. ARGV[2])
redis.call('LTRIM', P .. 'unreadable', 0, C.max_unreadable - 1)
redis.call('PEXPIRE', P .. 'unreadable', C.dead_ms)
return redis.status_reply('OK')
