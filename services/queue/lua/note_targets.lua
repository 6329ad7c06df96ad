--@use base
-- Keeps how many replicas the leader wants, for its successor.
-- ARGV: limits, epoch of the leader, the targets
-- Returns OK.
local fenced = stale(ARGV[2])
if fenced then return fenced end
redis.call('SET', P .. 'targets', ARGV[3])
return redis.status_reply('OK')
