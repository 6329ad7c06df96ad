-- Library (needs base): the per-(priority, tenant) queues, and the tenants' deficits.
-- queue:<p>:<tenant> is a sorted set of '<seq>:<cost>:<id>' by deadline; ring:<p> the tenants that have one;
-- deficit:<p> what each of them may still start, in tokens. A tenant is in the ring while it has a deficit field.
local function queue_key(r) return P .. 'queue:' .. r.priority .. ':' .. r.tenant end
local function member(r) return string.format('%s:%d:%s', r.seq, r.cost, r.id) end

local function count_queued(requests, tokens)
  redis.call('HINCRBY', P .. 'queue:stats', 'requests', requests)
  redis.call('HINCRBY', P .. 'queue:stats', 'tokens', tokens)
end

-- Puts r into its queue at its own place. restored: tokens that the tenant gets back, because a claim is undone.
local function enqueue(r, restored)
  local ring, deficit = P .. 'ring:' .. r.priority, P .. 'deficit:' .. r.priority
  if redis.call('ZADD', queue_key(r), r.deadline, member(r)) == 1 then count_queued(1, r.cost) end
  redis.call('ZADD', P .. 'deadlines', r.deadline, r.id)
  if redis.call('HEXISTS', deficit, r.tenant) == 1 then
    redis.call('HINCRBY', deficit, r.tenant, restored)
  elseif restored > 0 then
    redis.call('LPUSH', ring, r.tenant)
    redis.call('HSET', deficit, r.tenant, restored)
  else
    redis.call('RPUSH', ring, r.tenant)
    redis.call('HSET', deficit, r.tenant, C.quantum)
  end
  r.state = 'queued'
  if restored == 0 then set(r, 'queued_at', NOW) end
  set(r, 'state', 'queued', 'attempt', r.attempt, 'holder', '', 'streamed', '')
  redis.call('PEXPIRE', P .. 'req:' .. r.id, record_ms(r))
end

-- Takes r out of its queue; true if the tenant's queue is empty now. The ring is left alone.
local function remove_member(r)
  local queue = queue_key(r)
  if redis.call('ZREM', queue, member(r)) == 1 then count_queued(-1, -r.cost) end
  redis.call('ZREM', P .. 'deadlines', r.id)
  return redis.call('EXISTS', queue) == 0
end

-- Takes r out of its queue, and the tenant out of the ring if that was its last request.
local function unqueue(r)
  if remove_member(r) then
    redis.call('LREM', P .. 'ring:' .. r.priority, 0, r.tenant)
    redis.call('HDEL', P .. 'deficit:' .. r.priority, r.tenant)
  end
end

-- The first member of a tenant's queue, or nil.
local function peek(priority, tenant)
  local head = redis.call('ZRANGE', P .. 'queue:' .. priority .. ':' .. tenant, 0, 0)[1]
  if not head then return nil end
  local seq, cost, id = string.match(head, '^(%d+):(%d+):(.*)$')
  return { seq = seq, cost = tonumber(cost), id = id, priority = priority, tenant = tenant }
end

-- Takes back the rounds that every tenant of a priority has beyond what its next request needs. Claims that are undone
-- leave such rounds behind; they would let a tenant take many turns in a row.
local function rebalance(priority)
  local key, rounds = P .. 'deficit:' .. priority, math.huge
  local flat = redis.call('HGETALL', key)
  for k = 1, #flat, 2 do
    local head = peek(priority, flat[k])
    if head then rounds = math.min(rounds, math.floor((tonumber(flat[k + 1]) - head.cost) / C.quantum)) end
  end
  if rounds == math.huge or rounds <= 0 then return end
  for k = 1, #flat, 2 do redis.call('HINCRBY', key, flat[k], -rounds * C.quantum) end
end

-- Gives unused tokens back to a tenant that has requests waiting; a tenant without any keeps no deficit.
local function refund(r, tokens)
  local deficit = P .. 'deficit:' .. r.priority
  local current = tonumber(redis.call('HGET', deficit, r.tenant))
  if not current or tokens <= 0 then return end
  redis.call('HSET', deficit, r.tenant, math.min(current + tokens, math.max(current, C.refund_quanta * C.quantum)))
end
