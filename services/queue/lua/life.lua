-- Library (needs base, prompts, suspects, queue): the steps of a request's life that several scripts share.

-- Enters r among the requests of the gateway that it replies to. A gateway without a lease gets one, so that its death
-- is noticed.
local function own(r)
  redis.call('SADD', P .. 'owned:' .. r.reply_to, r.id)
  extend(P .. 'owned:' .. r.reply_to, record_ms(r))
  redis.call('ZADD', P .. 'gateways', 'NX', NOW + C.lease_ms, r.reply_to)
end

-- Moves r to another gateway; the former gateway gets 'cancelled' if it lives.
local function move(r, reply_to)
  if redis.call('ZSCORE', P .. 'gateways', r.reply_to) then send_end(r, 'cancelled') end
  redis.call('SREM', P .. 'owned:' .. r.reply_to, r.id)
  r.reply_to = reply_to
  set(r, 'reply_to', reply_to)
  own(r)
end

-- Writes a new record and queues it. r: id, tenant, priority, cost, budget, delivered, reply_to, attempt, deadline, and
-- the name of its prompt ('': the body has it), whose ids are stored where they are missing.
local function create(r, body, ids)
  r.seq = string.format('%020.0f', redis.call('INCR', P .. 'seq'))
  set(r, 'body', body, 'failures', 0, 'seq', r.seq, 'deadline', r.deadline, 'tenant', r.tenant,
    'priority', r.priority, 'cost', r.cost, 'budget', r.budget, 'delivered', r.delivered,
    'reply_to', r.reply_to, 'admitted', NOW, 'prompt', r.prompt, 'wire', C.wire)
  take_prompt(r.prompt, ids, record_ms(r))
  redis.call('ZADD', P .. 'tenant:' .. r.tenant, NOW + record_ms(r), r.id)
  extend(P .. 'tenant:' .. r.tenant, record_ms(r))
  own(r)
  enqueue(r, 0)
end

-- Writes what r is to go on with; body, prompt and ids as for create.
local function rewrite(r, body, delivered, prompt, ids)
  local former = r.prompt
  if prompt ~= former or not has_prompt(prompt) then take_prompt(prompt, ids, record_ms(r)) end
  if prompt ~= former then give_prompt_back(former) end
  r.prompt = prompt
  set(r, 'body', body, 'delivered', delivered, 'prompt', prompt)
end

local function send_cancel(r)
  if redis.call('EXISTS', P .. 'worker:' .. r.holder) == 1 then
    append_inbox(r.holder, cmsgpack.pack({ 'cancel', r.id, r.attempt }))
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

-- Takes r from its worker or leader before its next attempt: the tenant gets its tokens back, a worker a Cancel.
local function withdraw(r)
  if r.state == 'running' then send_cancel(r) end
  if r.state == 'running' or r.state == 'claimed' then refund(r, r.cost) end
  detach(r)
end

-- Ends a detached request: a tombstone that refuses late results remains. cancelled: 1 by its gateway.
local function conclude(r, cancelled)
  local key = P .. 'req:' .. r.id
  give_prompt_back(r.prompt)
  clear(r.id)
  redis.call('ZREM', P .. 'tenant:' .. r.tenant, r.id)
  redis.call('SREM', P .. 'owned:' .. r.reply_to, r.id)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'done', 'attempt', r.attempt, 'reply_to', r.reply_to, 'cancelled', cancelled)
  redis.call('PEXPIRE', key, C.tombstone_ms)
  wake()
end

-- Ends r because its gateway asked for it (by 1) or is gone (by 0). delivered: tokens that are not refunded.
local function cancel(r, by, delivered)
  if r.state == 'running' then send_cancel(r) end
  if r.state == 'claimed' then refund(r, r.cost) end
  if r.state == 'running' and delivered then refund(r, r.budget - delivered) end
  detach(r)
  conclude(r, by)
end

-- Ends r with a typed error (msgpack) to its gateway.
local function fail(r, error)
  detach(r)
  send_end(r, 'error', error)
  conclude(r, 0)
end

local undone = {} -- priorities of requests that went back into the queue

-- Puts r back into the queue as the same attempt: it published nothing. Its callers end with rebalance_undone.
local function requeue(r)
  detach(r)
  enqueue(r, r.cost)
  undone[r.priority] = true
end

local function rebalance_undone()
  for priority in pairs(undone) do rebalance(priority) end
end

-- Forgets a dead letter; whether there was one.
local function unbury(id)
  give_prompt_back(redis.call('HGET', P .. 'dead:' .. id, 'prompt') or '')
  redis.call('ZREM', P .. 'dead', id)
  return redis.call('DEL', P .. 'dead:' .. id) == 1
end

local function bury(r, reason)
  local key = P .. 'dead:' .. r.id
  local body = redis.call('HGET', P .. 'req:' .. r.id, 'body') or ''
  redis.call('HSET', key, 'body', body, 'reason', reason, 'attempt', r.attempt, 'failures', r.failures,
    'worker', r.holder, 'when', NOW, 'prompt', r.prompt, 'wire', C.wire,
    'bytes', #body + redis.call('STRLEN', P .. 'prompt:' .. r.prompt))
  redis.call('PEXPIRE', key, C.dead_ms)
  take_prompt(r.prompt, '', C.dead_ms)
  redis.call('ZADD', P .. 'dead', NOW, r.id)
  local dead, bytes = redis.call('ZREVRANGE', P .. 'dead', 0, -1), 0
  for rank, id in ipairs(dead) do
    bytes = bytes + (tonumber(redis.call('HGET', P .. 'dead:' .. id, 'bytes')) or 0)
    if rank > C.max_dead or (rank > 1 and bytes > C.dead_bytes) then unbury(id) end
  end
end

-- Removes a worker that holds nothing any more; returns whether it was there.
local function remove_worker(worker)
  redis.call('DEL', P .. 'worker:' .. worker, P .. 'held:' .. worker, P .. 'inbox:' .. worker)
  return redis.call('ZREM', P .. 'workers', worker) == 1
end

local fates = {} -- what became of requests, for their lines in a log: outcome, id, attempt, worker, tenant, ...

local function note_fate(outcome, r, attempt, worker)
  for _, value in ipairs({ outcome, r.id, attempt, worker, r.tenant }) do fates[#fates + 1] = value end
end

-- Ends the running attempt of r, which is lost. Returns 'lost' or, over the cap of failures, 'dead'. A request that
-- kills its workers dies at the same token each time: it is stuck. The smaller cap on stuck attempts spares requests
-- that ran with it, which got further between the same failures. Scores of a prompt do not count as tokens: a prompt
-- is computed in parts, and a request that kills its worker at the second part would never be stuck.
local function lose(r, reason, failures)
  send_cancel(r)
  detach(r)
  refund(r, r.cost)
  r.attempt = r.attempt + 1
  r.failures = r.failures + failures
  r.stuck = (r.streamed == '1' and 0 or r.stuck) + failures
  if failures > 0 and (r.streamed ~= '1' or r.failures >= OFTEN) then r.suspect = suspect(r) end
  if failures > 0 and (r.failures >= C.max_attempts or r.stuck >= C.max_stuck) then
    bury(r, reason)
    send_end(r, 'error', C.exhausted)
    conclude(r, 0)
    note_fate('dead', r, r.attempt - 1, r.holder)
    return 'dead'
  end
  set(r, 'state', 'lost', 'attempt', r.attempt, 'failures', r.failures, 'stuck', r.stuck,
    'holder', '', 'streamed', '', 'suspect', r.suspect)
  redis.call('ZADD', P .. 'leases', NOW + C.lost_ms, r.id)
  send_lost(r, reason)
  note_fate('lost', r, r.attempt - 1, r.holder)
  return 'lost'
end

-- Takes back up to limit requests of a dead worker, and removes the worker when it holds none any more. Where a suspect
-- ran there, its attempt alone counts as failed. Returns {lost, dead}, whether the worker was removed, and what is left
-- of limit. The field 'blamed' keeps the suspect for the next call.
local function bereave(worker, limit)
  local held, count = P .. 'held:' .. worker, { lost = 0, dead = 0 }
  local culprit = redis.call('HGET', P .. 'worker:' .. worker, 'blamed')
  if not culprit then
    local _, alone = unproven(worker)
    culprit = alone or ''
    if redis.call('EXISTS', P .. 'worker:' .. worker) == 1 then
      redis.call('HSET', P .. 'worker:' .. worker, 'blamed', culprit)
    end
  end
  for _, id in ipairs(redis.call('HKEYS', held)) do
    if limit <= 0 then break end
    limit = limit - 1
    local r = load_record(id)
    if r and r.state == 'running' and r.holder == worker then
      local outcome = lose(r, 'worker lost', (culprit == '' or culprit == id) and 1 or 0)
      count[outcome] = count[outcome] + 1
    end
    redis.call('HDEL', held, id)
  end
  local removed = redis.call('EXISTS', held) == 0
  return count, removed and remove_worker(worker), limit
end
