--@use base member
-- Registers a gateway or renews its lease.
-- ARGV: limits, incarnation, lease ms, model fingerprint or '', 1 if its last heartbeat claimed the same
-- Returns OK, or the error FINGERPRINT, having changed nothing.
local claimed = ARGV[5] == '1' and claimed_until('gateways', ARGV[2], tonumber(ARGV[3]), C.lease_ms) or 0
local mismatch = claim_model(ARGV[4], C.lease_ms, claimed)
if mismatch then return mismatch end
redis.call('ZADD', P .. 'gateways', NOW + tonumber(ARGV[3]), ARGV[2])
if redis.call('EXISTS', P .. 'results:' .. ARGV[2]) == 1 then
  redis.call('PEXPIRE', P .. 'results:' .. ARGV[2], C.stream_ms)
end
return redis.status_reply('OK')
