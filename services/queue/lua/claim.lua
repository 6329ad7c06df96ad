--@use base prompts suspects queue life
-- Takes requests out of the queue for the leader: strict between priorities, deficit round-robin between tenants.
-- ARGV: limits, epoch, most requests, most tokens (0: no bound)
-- Returns {{id, body, attempt, deadline, reply_to, the prompt's beginning ('': in the body), '1' for a suspect, ms that
-- it has waited}, ...}.
-- Guarantees: a tenant is served while its deficit covers the head of its queue; then the deficit grows by one quantum
-- and the next tenant's turn comes. Rounds in which nobody could be served are granted at once, so the work is bounded
-- by requests x tenants.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local max_requests, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
local answer, tokens, done = {}, 0, max_requests <= 0
local spare = 256 -- how many more members may be dropped in passing (expired, or their record is gone)

-- The beginning of a prompt, once for all requests that share it.
local begun = {}
local function beginning(prompt)
  if prompt == '' or begun[prompt] then return '' end
  begun[prompt] = true
  return redis.call('GETRANGE', P .. 'prompt:' .. prompt, 0, C.head_bytes - 1)
end

-- True if the head was claimed, false if it was dropped.
local function take(head)
  local r = load_record(head.id)
  remove_member(head)
  if not r or r.state ~= 'queued' or r.seq ~= head.seq then
    spare = spare - 1
    return false
  end
  if r.deadline <= NOW then
    spare = spare - 1
    send_end(r, 'error', C.expired)
    conclude(r, 0)
    return false
  end
  set(r, 'state', 'claimed', 'holder', ARGV[2])
  redis.call('ZADD', P .. 'claims', ARGV[2], r.id)
  redis.call('ZADD', P .. 'leases', NOW + C.lease_ms, r.id)
  local body = redis.call('HGET', P .. 'req:' .. r.id, 'body') or ''
  local waited = math.max(NOW - r.queued_at, 0)
  answer[#answer + 1] = { r.id, body, r.attempt, r.deadline, r.reply_to, beginning(r.prompt), r.suspect, waited }
  tokens = tokens + r.cost
  return true
end

-- Whether the claim is complete before head. Then no request of a lower priority may follow.
local function full(head)
  done = #answer >= max_requests or spare <= 0 or (max_tokens > 0 and #answer > 0 and tokens + head.cost > max_tokens)
  return done
end

-- The tenants of a priority, whose turn it is first: ring, deficits, and heads of their queues (read when needed).
local function read_turns(priority)
  local turns = { priority = priority, deficit = {}, heads = {}, changed = {} }
  turns.ring = redis.call('LRANGE', P .. 'ring:' .. priority, 0, -1)
  local flat = redis.call('HGETALL', P .. 'deficit:' .. priority)
  for k = 1, #flat, 2 do turns.deficit[flat[k]] = tonumber(flat[k + 1]) end
  return turns
end

local function write_turns(turns, first)
  local ring, key = {}, P .. 'ring:' .. turns.priority
  for k = 0, #turns.ring - 1 do ring[k + 1] = turns.ring[(first - 1 + k) % #turns.ring + 1] end
  redis.call('DEL', key)
  for k = 1, #ring, 1000 do redis.call('RPUSH', key, unpack(ring, k, math.min(k + 999, #ring))) end
  for t in pairs(turns.changed) do
    if turns.deficit[t] then
      redis.call('HSET', P .. 'deficit:' .. turns.priority, t, turns.deficit[t])
    else
      redis.call('HDEL', P .. 'deficit:' .. turns.priority, t)
    end
  end
end

local function add(turns, t, amount)
  turns.deficit[t] = (turns.deficit[t] or 0) + amount
  turns.changed[t] = true
end

-- Grants every tenant as many rounds as it takes until one of them can be served. All heads are known here.
local function skip_rounds(turns)
  local rounds = math.huge
  for _, t in ipairs(turns.ring) do
    rounds = math.min(rounds, math.ceil((turns.heads[t].cost - turns.deficit[t]) / C.quantum))
  end
  if rounds <= 0 then return end
  for _, t in ipairs(turns.ring) do add(turns, t, rounds * C.quantum) end
end

local function serve(priority)
  local turns = read_turns(priority)
  local ring, i, misses = turns.ring, 1, 0
  while #ring > 0 do
    local t = ring[i]
    local head = turns.heads[t] or peek(priority, t)
    turns.heads[t] = head
    local deficit = turns.deficit[t] or 0
    if not head then -- the tenant's queue is empty: it leaves the ring and keeps nothing
      table.remove(ring, i)
      turns.deficit[t], turns.changed[t] = nil, true
      i = (i > #ring) and 1 or i
    elseif head.cost <= deficit then
      if full(head) then break end
      if take(head) then add(turns, t, -head.cost) end
      misses, turns.heads[t] = 0, nil
    else
      add(turns, t, C.quantum)
      i, misses = i % #ring + 1, misses + 1
      if misses >= #ring then
        skip_rounds(turns)
        misses = 0
      end
    end
  end
  write_turns(turns, i)
end

for priority = 0, 9 do
  if not done and redis.call('EXISTS', P .. 'ring:' .. priority) == 1 then serve(priority) end
end
return answer
