-- Library (needs base): Idempotency-Keys. Each is bound to a job's base id and seed when the job is admitted.
-- idem:<tenant>:<hash of the key> is the binding, idem_of:<tenant> the tenant's bindings by the time at which they end,
-- idem:all the bindings of all tenants.

-- {'key', fingerprint, base id, seed, former owner} of a key that is bound, or nil. Where fingerprints agree, owner
-- owns the key from now on.
local function binding(suffix, owner, fingerprint)
  local key = P .. 'idem:' .. suffix
  local v = redis.call('HMGET', key, 'fingerprint', 'base', 'seed', 'owner')
  if not v[1] then return nil end
  if v[1] == fingerprint then redis.call('HSET', key, 'owner', owner) end
  return { 'key', v[1], v[2], v[3], v[4] }
end

-- Drops bindings of an index beyond limit, the first to end first; at most 100 in a call, as a limit may be lowered.
local function forget(index, limit)
  local excess = math.min(redis.call('ZCARD', index) - limit, 100)
  if excess <= 0 then return end
  local popped = redis.call('ZPOPMIN', index, excess) -- binding, time, binding, time ...
  for k = 1, #popped, 2 do
    redis.call('DEL', P .. 'idem:' .. popped[k])
    redis.call('ZREM', P .. 'idem:all', popped[k])
    redis.call('ZREM', P .. 'idem_of:' .. string.match(popped[k], '^(.*):'), popped[k])
  end
end

-- Binds a key. All tenants together have at most C.max_all_keys bindings, each at most C.max_keys of them.
local function bind(tenant, suffix, owner, fingerprint, base, seed)
  local key, index = P .. 'idem:' .. suffix, P .. 'idem_of:' .. tenant
  redis.call('HSET', key, 'fingerprint', fingerprint, 'base', base, 'seed', seed, 'owner', owner, 'created', NOW,
    'wire', C.wire)
  redis.call('PEXPIRE', key, C.idem_ms)
  redis.call('ZREMRANGEBYSCORE', index, '-inf', NOW)
  redis.call('ZADD', index, NOW + C.idem_ms, suffix)
  redis.call('ZADD', P .. 'idem:all', NOW + C.idem_ms, suffix)
  for _, each in ipairs({ index, P .. 'idem:all' }) do redis.call('PEXPIRE', each, C.idem_ms) end
  forget(index, C.max_keys)
  forget(P .. 'idem:all', C.max_all_keys)
end
