--@use base seat
-- Tells a seat which group to hold; its worker hears it with its next heartbeat.
-- ARGV: limits, epoch, worker, digest of the group, the group
-- Returns 1, or 0 if the seat is gone or leaves.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local key = P .. 'seat:' .. ARGV[3]
if not seated(ARGV[3]) or redis.call('HGET', key, 'status') == 'leaving' then return 0 end
redis.call('HSET', key, 'digest', ARGV[4], 'assignment', ARGV[5])
return 1
