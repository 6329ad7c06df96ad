--@use base member seat
-- Renews the lease of a seat, notes what its worker reports and answers with what the scheduler wants of it.
-- ARGV: limits, worker, status, report, rows ('': as before), digest of the assignment that it knows
-- Returns nil if the worker has no seat (any more), else {number, 1 to leave, epoch of the table, oldest epoch in use
-- (-1: none), digest of the assignment ('': none), the assignment ('' if it is the one it knows)}.
-- Guarantees: a seat that leaves does not come back.
-- Thousands of seats send heartbeats: each call below is made that often.
local worker, key, status = ARGV[2], P .. 'seat:' .. ARGV[2], ARGV[3]
local v = redis.call('HMGET', key, 'lease_ms', 'fingerprint', 'status', 'dismissed', 'digest', 'report')
local number = v[1] and redis.call('ZSCORE', P .. 'seat_numbers', worker)
if not number then return nil end
local lease_ms = tonumber(v[1])
local mismatch = claim_model(v[2], lease_ms, claimed_until('seats', worker, lease_ms))
if mismatch then return mismatch end
if v[3] == 'leaving' then status = v[3] end
redis.call('ZADD', P .. 'seats', NOW + lease_ms, worker)

-- Whether the scheduler has to see the report: not if only its last entries differ, the rows in flight and the load.
local function news()
  if status ~= v[3] then return true end
  if ARGV[4] == v[6] then return false end
  local now, before = cmsgpack.unpack(ARGV[4]), v[6] and cmsgpack.unpack(v[6]) or {}
  return now[1] ~= before[1] or now[2] ~= before[2] or now[3] ~= before[3]
end

local is_news = news()
if is_news or ARGV[4] ~= v[6] then redis.call('HSET', key, 'status', status, 'report', ARGV[4]) end
if ARGV[5] ~= '' then redis.call('HSET', key, 'rows', ARGV[5]) end
redis.call('PEXPIRE', key, C.stream_ms)
if is_news then changed(worker) end
if status ~= v[3] then wake() end
local leave = (v[4] or status == 'leaving') and 1 or 0
local assignment = v[5] and v[5] ~= ARGV[6] and redis.call('HGET', key, 'assignment') or ''
local current, oldest = published_and_oldest()
return { tonumber(number), leave, current, oldest or -1, v[5] or '', assignment }
