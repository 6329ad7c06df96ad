--@use base member seat
-- Gives an expert worker its seat under a lease, or renews all that is known of it.
-- ARGV: limits, worker, lease ms, info, model fingerprint, number that it had before Redis forgot it (0: none)
-- Returns the number of the seat, or the error FINGERPRINT, having changed nothing.
-- Guarantees: a worker that has a seat keeps it; a number goes to one worker only. Where Redis forgot a seat it may have
-- forgotten readers of the table too: for a lease's time, every epoch counts as in use.
local worker, lease_ms, former = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6])
local mismatch = claim_model(ARGV[5], lease_ms)
if mismatch then return mismatch end
local number = tonumber(redis.call('ZSCORE', P .. 'seat_numbers', worker))
if not number then
  local last = tonumber(redis.call('GET', P .. 'last_seat')) or 0
  local free = former > 0 and redis.call('ZCOUNT', P .. 'seat_numbers', former, former) == 0
  number = free and former or above(math.max(last, former))
  redis.call('SET', P .. 'last_seat', math.max(last, number))
  redis.call('ZADD', P .. 'seat_numbers', number, worker)
  if former > 0 then redis.call('SET', P .. 'epochs_lost', 1, 'PX', C.lease_ms) end
end
redis.call('ZADD', P .. 'seats', NOW + lease_ms, worker)
redis.call('HSET', P .. 'seat:' .. worker, 'lease_ms', lease_ms, 'info', ARGV[4], 'fingerprint', ARGV[5])
redis.call('HSETNX', P .. 'seat:' .. worker, 'status', 'waiting')
redis.call('PEXPIRE', P .. 'seat:' .. worker, C.stream_ms)
wake()
return number
