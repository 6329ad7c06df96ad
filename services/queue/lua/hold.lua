--@use base reclaim
-- Holds the reclaiming of leases back; never shortens a hold.
-- ARGV: limits, ms
hold(tonumber(ARGV[2]))
return redis.status_reply('OK')
