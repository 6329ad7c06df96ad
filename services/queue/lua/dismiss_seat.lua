--@use base seat
-- Asks a seat to leave; its worker learns of it with its next heartbeat.
-- ARGV: limits, epoch, worker
-- Returns 1, or 0 if the seat is gone.
local fenced = stale(ARGV[2])
if fenced then return fenced end
if not seated(ARGV[3]) then return 0 end
redis.call('HSET', P .. 'seat:' .. ARGV[3], 'dismissed', 1)
changed(ARGV[3])
return 1
