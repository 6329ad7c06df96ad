--@use base member
-- Registers a gateway or renews its lease.
-- ARGV: limits, incarnation, lease ms, model fingerprint or '', ms since it claimed the same (-1: never). The lease
-- does not say when that was: heartbeats that claim nothing renew it, too.
-- Returns OK, or the error FINGERPRINT, having changed nothing.
local age = tonumber(ARGV[5])
local claimed = age >= 0 and NOW - age + 2 * C.lease_ms or 0
local mismatch = claim_model(ARGV[4], C.lease_ms, claimed)
if mismatch then return mismatch end
redis.call('ZADD', P .. 'gateways', NOW + tonumber(ARGV[3]), ARGV[2])
if redis.call('EXISTS', P .. 'results:' .. ARGV[2]) == 1 then
  redis.call('PEXPIRE', P .. 'results:' .. ARGV[2], C.stream_ms)
end
return redis.status_reply('OK')
