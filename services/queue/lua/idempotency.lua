--@use base
-- Binds an Idempotency-Key, or tells what it is bound to.
-- ARGV: limits, key suffix, body fingerprint, base id, seed, owner, ttl ms
-- Returns {fresh 1 or 0, fingerprint, base id, seed, former owner}. The caller becomes the owner if fingerprints agree.
local key = P .. 'idem:' .. ARGV[2]
local v = redis.call('HMGET', key, 'fingerprint', 'base', 'seed', 'owner')
if not v[1] then
  redis.call('HSET', key, 'fingerprint', ARGV[3], 'base', ARGV[4], 'seed', ARGV[5], 'owner', ARGV[6], 'created', NOW)
  redis.call('PEXPIRE', key, ARGV[7])
  return { 1, ARGV[3], ARGV[4], ARGV[5], ARGV[6] }
end
if v[1] == ARGV[3] then redis.call('HSET', key, 'owner', ARGV[6]) end
return { 0, v[1], v[2], v[3], v[4] }
