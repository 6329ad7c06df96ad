--@use base member seat
-- Renews the lease of a seat, notes what its worker reports and tells what the scheduler wants of it.
-- ARGV: limits, worker, status, report, rows ('': as before), digest of the assignment that it knows
-- Returns nil if the worker has no seat (any more), else {number, 1 to leave, epoch of the table, oldest epoch in use
-- (-1: none), digest of the assignment ('': none), the assignment ('' if it is the one it knows)}.
-- Guarantees: a seat that leaves does not come back.
local worker, key, status = ARGV[2], P .. 'seat:' .. ARGV[2], ARGV[3]
if not seated(worker) then return nil end
local v = redis.call('HMGET', key, 'lease_ms', 'fingerprint', 'status', 'dismissed', 'digest', 'assignment')
local mismatch = claim_model(v[2], tonumber(v[1]))
if mismatch then return mismatch end
if v[3] == 'leaving' then status = v[3] end
redis.call('ZADD', P .. 'seats', NOW + tonumber(v[1]), worker)
redis.call('HSET', key, 'status', status, 'report', ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', key, 'rows', ARGV[5]) end
redis.call('PEXPIRE', key, C.stream_ms)
if status ~= v[3] then wake() end
local leave = (v[4] or status == 'leaving') and 1 or 0
local assignment = v[5] and v[5] ~= ARGV[6] and v[6] or ''
local number = tonumber(redis.call('ZSCORE', P .. 'seat_numbers', worker))
return { number, leave, published(), epochs_in_use() or -1, v[5] or '', assignment }
