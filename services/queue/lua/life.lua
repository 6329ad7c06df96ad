-- Library (needs base, queue): the steps of a request's life that several scripts share.

-- Enters r among the requests of the gateway that it replies to. One without a lease gets it: its death must be seen.
local function own(r)
  redis.call('SADD', P .. 'owned:' .. r.reply_to, r.id)
  extend(P .. 'owned:' .. r.reply_to, record_ms(r))
  redis.call('ZADD', P .. 'gateways', 'NX', NOW + C.lease_ms, r.reply_to)
end

-- Gives r to another gateway; the one that had it hears 'cancelled', if it lives.
local function move(r, reply_to)
  if redis.call('ZSCORE', P .. 'gateways', r.reply_to) then send_end(r, 'cancelled') end
  redis.call('SREM', P .. 'owned:' .. r.reply_to, r.id)
  r.reply_to = reply_to
  set(r, 'reply_to', reply_to)
  own(r)
end

-- Writes a new record and queues it. r: id, tenant, priority, cost, budget, delivered, reply_to, attempt, deadline.
local function create(r, body)
  r.seq = string.format('%020.0f', redis.call('INCR', P .. 'seq'))
  set(r, 'body', body, 'failures', 0, 'seq', r.seq, 'deadline', r.deadline, 'tenant', r.tenant,
    'priority', r.priority, 'cost', r.cost, 'budget', r.budget, 'delivered', r.delivered,
    'reply_to', r.reply_to, 'admitted', NOW)
  redis.call('ZADD', P .. 'tenant:' .. r.tenant, NOW + record_ms(r), r.id)
  extend(P .. 'tenant:' .. r.tenant, record_ms(r))
  own(r)
  enqueue(r, 0)
end

local function tell_worker(r)
  if redis.call('EXISTS', P .. 'worker:' .. r.holder) == 1 then
    append(P .. 'inbox:' .. r.holder, 'm', cmsgpack.pack({ 'cancel', r.id, r.attempt }))
  end
end

-- Takes r from wherever it is (queue, leader, worker, waiting for its gateway) and returns a worker's credit.
local function detach(r)
  if r.state == 'queued' then return unqueue(r) end
  redis.call('ZREM', P .. 'leases', r.id)
  if r.state == 'claimed' then
    redis.call('ZREM', P .. 'claims', r.id)
  elseif r.state == 'running' then
    local worker = P .. 'worker:' .. r.holder
    if redis.call('HDEL', P .. 'held:' .. r.holder, r.id) == 1 and redis.call('EXISTS', worker) == 1 then
      redis.call('HINCRBY', worker, 'outstanding_tokens', -r.cost)
    end
  end
end

-- Ends a detached request: what remains is a tombstone that refuses late results.
local function conclude(r, cancelled)
  local key = P .. 'req:' .. r.id
  redis.call('ZREM', P .. 'tenant:' .. r.tenant, r.id)
  redis.call('SREM', P .. 'owned:' .. r.reply_to, r.id)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'done', 'attempt', r.attempt, 'reply_to', r.reply_to, 'cancelled', cancelled)
  redis.call('PEXPIRE', key, C.tombstone_ms)
  wake()
end

-- Ends r at the wish of its gateway, or because that is gone. delivered: tokens that need no refund.
local function cancel(r, delivered)
  if r.state == 'running' then tell_worker(r) end
  if r.state == 'claimed' then refund(r, r.cost) end
  if r.state == 'running' and delivered then refund(r, r.budget - delivered) end
  detach(r)
  conclude(r, 1)
end

-- Ends r with a typed error (msgpack) to its gateway.
local function fail(r, error)
  detach(r)
  send_end(r, 'error', error)
  conclude(r, 0)
end

local undone = {} -- priorities of requests that went back into the queue

-- Back into the queue as the same attempt: nothing of it was published. Scripts that do so end with settle_undone.
local function requeue(r)
  detach(r)
  enqueue(r, r.cost)
  undone[r.priority] = true
end

local function settle_undone()
  for priority in pairs(undone) do settle(priority) end
end

local function bury(r, reason)
  local key = P .. 'dead:' .. r.id
  redis.call('HSET', key, 'body', redis.call('HGET', P .. 'req:' .. r.id, 'body'), 'reason', reason,
    'attempt', r.attempt, 'failures', r.failures, 'worker', r.holder, 'when', NOW)
  redis.call('PEXPIRE', key, C.dead_ms)
  redis.call('ZADD', P .. 'dead', NOW, r.id)
  local excess = redis.call('ZCARD', P .. 'dead') - C.max_dead
  if excess > 0 then
    for _, id in ipairs(redis.call('ZRANGE', P .. 'dead', 0, excess - 1)) do redis.call('DEL', P .. 'dead:' .. id) end
    redis.call('ZREMRANGEBYRANK', P .. 'dead', 0, excess - 1)
  end
end

-- A worker that holds nothing any more is gone; whether it was there.
local function remove_worker(worker)
  redis.call('DEL', P .. 'worker:' .. worker, P .. 'held:' .. worker, P .. 'inbox:' .. worker)
  return redis.call('ZREM', P .. 'workers', worker) == 1
end

-- The running attempt of r is over without an end. Returns 'lost' or, over the cap of failures, 'dead'.
-- A request that kills its workers dies at the same token each time: it is stuck, and the smaller cap on that spares the
-- requests beside it, which got further between the same failures.
local function lose(r, reason, failures)
  tell_worker(r)
  detach(r)
  refund(r, r.cost)
  r.attempt = r.attempt + 1
  r.failures = r.failures + failures
  r.stuck = (r.streamed == '' and r.stuck or 0) + failures
  if failures > 0 and (r.failures >= C.max_attempts or r.stuck >= C.max_stuck) then
    bury(r, reason)
    send_end(r, 'error', C.exhausted)
    conclude(r, 0)
    return 'dead'
  end
  set(r, 'state', 'lost', 'attempt', r.attempt, 'failures', r.failures, 'stuck', r.stuck,
    'holder', '', 'streamed', '')
  redis.call('ZADD', P .. 'leases', NOW + C.lost_ms, r.id)
  send_lost(r, reason)
  return 'lost'
end
