-- Library (needs base): bounds on what is admitted, and how long to wait where they refuse.
-- drain: how fast the queue empties (tokens per ms assigned, decaying mean) and how long requests take (ms).
local DRAIN_MS = 30000

-- Ms since a time that was noted; 0 where the clock has stepped back behind it.
local function ms_since(noted) return math.max(NOW - (tonumber(noted) or NOW), 0) end

local function note_assigned(tokens)
  local key = P .. 'drain'
  local v = redis.call('HMGET', key, 'rate', 'at', 'since')
  local kept = (tonumber(v[1]) or 0) * math.exp(-ms_since(v[2]) / DRAIN_MS)
  redis.call('HSET', key, 'rate', kept + tokens / DRAIN_MS, 'at', NOW, 'since', v[3] or NOW)
  redis.call('PEXPIRE', key, 10 * DRAIN_MS)
end

local function note_ended(r)
  local took = ms_since(r.admitted)
  local mean = tonumber(redis.call('HGET', P .. 'drain', 'service')) or took
  redis.call('HSET', P .. 'drain', 'service', mean + 0.1 * (took - mean))
  redis.call('PEXPIRE', P .. 'drain', 10 * DRAIN_MS)
end

-- Ms until the queue has started that many tokens, by its recent speed.
local function drain_ms(tokens)
  local v = redis.call('HMGET', P .. 'drain', 'rate', 'at', 'since')
  if not v[1] then return 5000 end
  local age = ms_since(v[3])
  local seen = 1 - math.exp(-math.max(age, 1000) / DRAIN_MS) -- the mean starts from zero: correct for its youth
  local rate = tonumber(v[1]) * math.exp(-ms_since(v[2]) / DRAIN_MS) / seen
  return tokens / math.max(rate, 1e-6)
end

-- The first call of a batch is refused or admitted for the whole batch. queue:reserved says, by batch, what later calls
-- bring: '<requests>:<tokens>:<until, in ms>:<tenant>'. Each call renews it; it expires when the gateway has ended.
local function reserve(batch, requests, tokens, tenant)
  local key = P .. 'queue:reserved'
  if requests <= 0 then return redis.call('HDEL', key, batch) end
  redis.call('HSET', key, batch, string.format('%d:%d:%.0f:%s', requests, tokens, NOW + C.lease_ms, tenant))
  redis.call('PEXPIRE', key, C.lease_ms)
end

-- Requests, tokens, and requests of the tenant (own) that other batches have yet to bring.
local function reserved(batch, tenant)
  local key, requests, tokens, own = P .. 'queue:reserved', 0, 0, 0
  local flat = redis.call('HGETALL', key)
  for k = 1, #flat, 2 do
    local r, t, till, whose = string.match(flat[k + 1], '^(%d+):(%d+):(%d+):(.*)$')
    if tonumber(till) <= NOW then
      redis.call('HDEL', key, flat[k])
    elseif flat[k] ~= batch then
      requests, tokens = requests + r, tokens + t
      if whose == tenant then own = own + r end
    end
  end
  return { requests = requests, tokens = tokens, own = own }
end

local function refuse_queue(requests, tokens, to_come)
  local v = redis.call('HMGET', P .. 'queue:stats', 'requests', 'tokens')
  local queued = (tonumber(v[1]) or 0) + to_come.requests
  local queued_tokens = (tonumber(v[2]) or 0) + to_come.tokens
  local excess = queued + requests - C.max_requests
  if excess > 0 then
    local mean = (queued_tokens + tokens) / (queued + requests)
    return { 'requests', drain_ms(excess * mean), queued }
  end
  excess = queued_tokens + tokens - C.max_tokens
  if excess > 0 then return { 'tokens', drain_ms(excess), queued_tokens } end
end

local function refuse_concurrency(tenant, requests, limit, to_come)
  local key = P .. 'tenant:' .. tenant
  redis.call('ZREMRANGEBYSCORE', key, '-inf', NOW)
  local live = redis.call('ZCARD', key) + to_come.own
  if live + requests <= limit then return nil end
  local service = tonumber(redis.call('HGET', P .. 'drain', 'service')) or 5000
  return { 'concurrency', service / math.max(limit, 1), live }
end

-- Generic cell rate algorithm: rate:<tenant> is '<when>:<noted>', the time at which the allowance will be whole again,
-- and when that was noted: a clock that has stepped back since is behind it. (The release before writes the first alone,
-- and takes both for a whole allowance.) A request of more sequences than the burst passes when the allowance is whole,
-- except for the one that charge.lua took when the request came. together: how many sequences came together. later: how
-- many of them calls that follow will charge.
local function refuse_rate(tenant, more, interval_ms, burst, together, later)
  local key = P .. 'rate:' .. tenant
  local noted_whole, noted = string.match(redis.call('GET', key) or '', '^([%d.]+):?(%d*)$')
  local stepped_back = math.max((tonumber(noted) or NOW) - NOW, 0)
  local whole = math.max((tonumber(noted_whole) or NOW) - stepped_back, NOW) + more * interval_ms
  local wait = whole + (later or 0) * interval_ms - math.max(burst, together or more) * interval_ms - NOW
  if wait > 0 then return { 'rate', wait, 0 } end
  if more == 0 then return nil end
  redis.call('SET', key, string.format('%.3f:%.0f', whole, NOW), 'PX', math.ceil(whole - NOW))
end

-- Nil if the tenant may add requests of that many tokens, else {bound, wait in ms, count}. charge: {sequences to charge
-- now, sequences that came together, sequences to charge later}; charge.lua took the first when they came.
-- limits: concurrency (-1: none), ms between requests (0: no rate), burst. batch: their batch ('': none).
local function refuse(tenant, requests, tokens, limits, batch, charge)
  local concurrency, interval_ms, burst = tonumber(limits[1]), tonumber(limits[2]), tonumber(limits[3])
  local to_come = reserved(batch, tenant)
  local refusal = refuse_queue(requests, tokens, to_come)
  if not refusal and concurrency >= 0 then refusal = refuse_concurrency(tenant, requests, concurrency, to_come) end
  if not refusal and interval_ms > 0 and charge[1] + charge[3] > 0 then
    refusal = refuse_rate(tenant, charge[1], interval_ms, burst, charge[2], charge[3])
  end
  if refusal then refusal[2] = math.ceil(refusal[2]) end
  return refusal
end
