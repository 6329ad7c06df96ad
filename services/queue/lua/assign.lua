--@use base prompts suspects queue life admission
-- Moves claimed requests to workers, within the workers' leases and credit.
-- ARGV: limits, epoch, then per request id, attempt, worker, Assign message
-- Returns per request the ms that it waited in the queue, or -1 if it was not assigned.
-- Guarantees: -1 means that the request is back at its place, or was no longer the leader's (cancelled, taken back).
local fenced = stale(ARGV[2])
if fenced then return fenced end

local known = {} -- by worker: {open: unproven requests, alone: whether a suspect is among them}, read once

local function company(worker)
  if not known[worker] then
    local open, alone = unproven(worker)
    known[worker] = { open = open, alone = alone }
  end
  return known[worker]
end

-- The worker's lease in ms; nil if it is gone, has no credit for r, or a suspect (r or one of its own) must run alone.
local function credit(r, worker)
  local lease = tonumber(redis.call('ZSCORE', P .. 'workers', worker))
  if not lease or lease <= NOW then return nil end
  local fields = { 'lease_ms', 'credit_tokens', 'credit_requests', 'outstanding_tokens' }
  local v = redis.call('HMGET', P .. 'worker:' .. worker, unpack(fields))
  if not v[1] then return nil end
  local requests = redis.call('HLEN', P .. 'held:' .. worker)
  if requests >= tonumber(v[3]) then return nil end
  if requests > 0 and tonumber(v[4]) + r.cost > tonumber(v[2]) then return nil end
  local others = company(worker)
  if others.alone or (r.suspect == '1' and others.open > 0) then return nil end
  return tonumber(v[1])
end

local answer = {}
for i = 3, #ARGV, 4 do
  local r, worker = load_record(ARGV[i]), ARGV[i + 2]
  local ours = r and r.state == 'claimed' and r.holder == ARGV[2] and r.attempt == tonumber(ARGV[i + 1])
  local lease_ms = ours and credit(r, worker)
  if lease_ms then
    redis.call('ZREM', P .. 'claims', r.id)
    set(r, 'state', 'running', 'holder', worker)
    redis.call('HSET', P .. 'held:' .. worker, r.id, r.cost)
    redis.call('PEXPIRE', P .. 'held:' .. worker, C.stream_ms)
    redis.call('HINCRBY', P .. 'worker:' .. worker, 'outstanding_tokens', r.cost)
    redis.call('ZADD', P .. 'leases', NOW + lease_ms, r.id)
    append_inbox(worker, ARGV[i + 3])
    local others = company(worker)
    others.open, others.alone = others.open + 1, others.alone or r.suspect == '1'
    note_assigned(r.cost)
  elseif ours then
    requeue(r)
  end
  answer[#answer + 1] = lease_ms and math.max(NOW - r.queued_at, 0) or -1
end
rebalance_undone()
return answer
