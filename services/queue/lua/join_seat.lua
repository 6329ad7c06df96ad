--@use base member seat reclaim
-- Gives an expert worker its seat under a lease, or renews all that is known of it.
-- ARGV: limits, worker, lease ms, info, claim of the model, number that it had before Redis forgot it (0: none), status,
-- report, digest of the group that it was assigned ('': none), the group; the last four count where the seat is new
-- Returns the number of the seat, or the error FINGERPRINT, having changed nothing.
-- Guarantees: a worker that has a seat keeps it; a number goes to one worker only. A seat that Redis forgot is back
-- with all that it holds in one step. Redis may have forgotten readers of the table, too: for the time of a lease
-- every epoch counts as in use. Where the table is gone, nothing is reclaimed in that time: other members are about
-- to come back.
local worker, lease_ms, former = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6])
local key = P .. 'seat:' .. worker
local v = redis.call('HMGET', key, 'lease_ms', 'fingerprint')
local before = v[1] and v[2] == ARGV[5] and tonumber(v[1])
local mismatch = claim_model(ARGV[5], lease_ms, before and claimed_until('seats', worker, before) or 0)
if mismatch then return mismatch end
local number = tonumber(redis.call('ZSCORE', P .. 'seat_numbers', worker))
if not number then
  local last = tonumber(redis.call('GET', P .. 'last_seat')) or 0
  local free = former > 0 and redis.call('ZCOUNT', P .. 'seat_numbers', former, former) == 0
  number = free and former or above(math.max(last, former))
  redis.call('SET', P .. 'last_seat', math.max(last, number))
  redis.call('ZADD', P .. 'seat_numbers', number, worker)
  if former > 0 then redis.call('SET', P .. 'epochs_lost', 1, 'PX', C.lease_ms) end
  if former > 0 and published() == 0 then hold(C.lease_ms) end
end
redis.call('ZADD', P .. 'seats', NOW + lease_ms, worker)
if redis.call('HSETNX', key, 'status', ARGV[7]) == 1 then
  redis.call('HSET', key, 'report', ARGV[8])
  if ARGV[9] ~= '' then redis.call('HSET', key, 'digest', ARGV[9], 'assignment', ARGV[10]) end
end
redis.call('HSET', key, 'lease_ms', lease_ms, 'info', ARGV[4], 'fingerprint', ARGV[5], 'wire', C.wire)
redis.call('PEXPIRE', key, C.stream_ms)
changed(worker)
wake()
return number
