--@use base member
-- Enters a worker into the registry, or renews all that is known of it.
-- ARGV: limits, worker, lease ms, info, claim of the model, credit tokens, credit requests
-- Returns OK, or the error FINGERPRINT, having changed nothing.
local worker, lease_ms = P .. 'worker:' .. ARGV[2], tonumber(ARGV[3])
local v = redis.call('HMGET', worker, 'lease_ms', 'fingerprint')
local before = v[1] and v[2] == ARGV[5] and tonumber(v[1])
local mismatch = claim_model(ARGV[5], lease_ms, before and claimed_until('workers', ARGV[2], before) or 0)
if mismatch then return mismatch end
redis.call('ZADD', P .. 'workers', NOW + lease_ms, ARGV[2])
redis.call('HSET', worker, 'lease_ms', lease_ms, 'info', ARGV[4], 'fingerprint', ARGV[5],
  'credit_tokens', ARGV[6], 'credit_requests', ARGV[7], 'wire', C.wire)
redis.call('HSETNX', worker, 'outstanding_tokens', 0)
redis.call('HDEL', worker, 'blamed')
redis.call('PEXPIRE', worker, C.stream_ms)
wake()
return redis.status_reply('OK')
