--@use base reclaim
-- Puts the reclaiming of leases on hold; never shortens a hold.
-- ARGV: limits, ms
hold(tonumber(ARGV[2]))
return redis.status_reply('OK')
