-- Library (needs base): Idempotency-Keys, each bound to a job's base id and seed when that is admitted.
-- idem:<tenant>:<hash of the key> is the binding, idem_of:<tenant> the tenant's bindings by the time at which they end.

-- {'key', fingerprint, base id, seed, former owner} of a key that is bound, or nil. Where fingerprints agree, owner owns
-- it from now on.
local function binding(suffix, owner, fingerprint)
  local key = P .. 'idem:' .. suffix
  local v = redis.call('HMGET', key, 'fingerprint', 'base', 'seed', 'owner')
  if not v[1] then return nil end
  if v[1] == fingerprint then redis.call('HSET', key, 'owner', owner) end
  return { 'key', v[1], v[2], v[3], v[4] }
end

-- Of a tenant that has more than C.max_keys of them, those go that would end first.
local function bind(tenant, suffix, owner, fingerprint, base, seed)
  local key, index = P .. 'idem:' .. suffix, P .. 'idem_of:' .. tenant
  redis.call('HSET', key, 'fingerprint', fingerprint, 'base', base, 'seed', seed, 'owner', owner, 'created', NOW,
    'wire', C.wire)
  redis.call('PEXPIRE', key, C.idem_ms)
  redis.call('ZREMRANGEBYSCORE', index, '-inf', NOW)
  redis.call('ZADD', index, NOW + C.idem_ms, suffix)
  redis.call('PEXPIRE', index, C.idem_ms)
  local excess = redis.call('ZCARD', index) - C.max_keys
  if excess > 0 then
    for _, old in ipairs(redis.call('ZPOPMIN', index, excess)) do redis.call('DEL', P .. 'idem:' .. old) end
  end
end
