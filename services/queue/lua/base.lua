-- Library: clock, record access, wake-up, and the events that the queue itself writes.
-- P is the key prefix of the namespace, C the caller's limits (msgpack map in ARGV[1]), NOW Redis TIME in ms.
local P = KEYS[1]
local C = cmsgpack.unpack(ARGV[1])
local TIME = redis.call('TIME')
local NOW = TIME[1] * 1000 + math.floor(TIME[2] / 1000)

local FIELDS = {
  'state', 'attempt', 'failures', 'stuck', 'holder', 'seq', 'deadline', 'tenant', 'priority', 'cost', 'budget',
  'delivered', 'streamed', 'reply_to', 'admitted', 'queued_at', 'cancelled', 'prompt', 'suspect',
}
local NUMBERS = {
  'attempt', 'failures', 'stuck', 'deadline', 'priority', 'cost', 'budget', 'delivered', 'admitted', 'queued_at',
}

-- The record of a request as a table, or nil. An ended one (state done) has attempt, reply_to and cancelled only.
local function load_record(id)
  local values = redis.call('HMGET', P .. 'req:' .. id, unpack(FIELDS))
  if not values[1] then return nil end
  local r = { id = id }
  for i, field in ipairs(FIELDS) do r[field] = values[i] or '' end
  for _, field in ipairs(NUMBERS) do r[field] = tonumber(r[field]) or 0 end
  return r
end

local function set(r, ...)
  redis.call('HSET', P .. 'req:' .. r.id, ...)
end

-- Lengthens a key's life to at least ms from now; never shortens it.
local function extend(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

local function record_ms(r)
  return math.max(r.deadline - NOW, 0) + C.grace_ms
end

local function wake()
  if redis.call('EXISTS', P .. 'wake') == 0 then
    redis.call('LPUSH', P .. 'wake', 1)
    redis.call('PEXPIRE', P .. 'wake', 60000)
  end
end

-- Whether to measure a stream after an entry. Measuring takes time in proportion to the stream's nodes, so it is done
-- at each 64th entry and at each large one: 63 others have an eighth of what the stream may have.
local function to_measure(key, ...)
  if redis.call('XLEN', key) % 64 == 0 then return true end
  local bytes = 0
  for _, part in ipairs({ ... }) do bytes = bytes + #tostring(part) end
  return bytes > C.stream_bytes / 512
end

-- Adds an entry to a stream that one process reads. A stream that takes more than C.stream_bytes loses its older half:
-- its reader is stuck, and will see by the indexes of later events that some are missing.
local function append(key, ...)
  redis.call('XADD', key, 'MAXLEN', '~', C.stream_entries, '*', ...)
  if to_measure(key, ...) and redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) > C.stream_bytes then -- all: they differ
    redis.call('XTRIM', key, 'MAXLEN', math.floor(redis.call('XLEN', key) / 2))
  end
  redis.call('PEXPIRE', key, C.stream_ms)
end

-- Adds an entry to a gateway's results: events by request, and a field that names the version and holds no events.
local function append_results(gateway, ...)
  append(P .. 'results:' .. gateway, 'wire:' .. C.wire, '\144', ...)
end

local function append_inbox(worker, message)
  append(P .. 'inbox:' .. worker, 'm', message, 'wire', C.wire)
end

-- [["lost", id, attempt, reason]], as services.messages encodes a list of one AttemptLost.
local function send_lost(r, reason)
  append_results(r.reply_to, r.id, cmsgpack.pack({ { 'lost', r.id, r.attempt, reason } }))
end

-- [["token", id, attempt, index, nil, finish, nil, nil, error, 0]]: a TokenEvent without a token. error is msgpack.
local function encode_end(r, finish, error)
  local null = '\192'
  return '\145\154' .. cmsgpack.pack('token', r.id, r.attempt, r.delivered) .. null .. cmsgpack.pack(finish)
    .. null .. null .. (error or null) .. cmsgpack.pack(0)
end

local function send_end(r, finish, error)
  append_results(r.reply_to, r.id, encode_end(r, finish, error))
end

-- An error reply unless epoch leads. Scripts return it before they change anything.
local function stale(epoch)
  if redis.call('GET', P .. 'leader:epoch') ~= epoch then
    return redis.error_reply('STALELEADER another scheduler leads')
  end
end
