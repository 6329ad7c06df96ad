--@use base member
-- Renews a worker's lease and the leases of the requests it holds.
-- ARGV: limits, worker, then per request id, attempt
-- Returns nil if the worker is not registered (any more), else {index of each request that is not its own any more}.
local worker = P .. 'worker:' .. ARGV[2]
local v = redis.call('HMGET', worker, 'lease_ms', 'fingerprint')
if not v[1] or not redis.call('ZSCORE', P .. 'workers', ARGV[2]) then return nil end
local lease_ms = tonumber(v[1])
local mismatch = claim_model(v[2], lease_ms, claimed_until('workers', ARGV[2], lease_ms))
if mismatch then return mismatch end
redis.call('ZADD', P .. 'workers', NOW + lease_ms, ARGV[2])
redis.call('HDEL', worker, 'blamed') -- it lives: the suspect of that death must not be held for its next one
for _, kind in ipairs({ 'worker:', 'held:', 'inbox:' }) do redis.call('PEXPIRE', P .. kind .. ARGV[2], C.stream_ms) end
local lost = {}
for i = 3, #ARGV, 2 do
  local r = redis.call('HMGET', P .. 'req:' .. ARGV[i], 'state', 'attempt', 'holder')
  if r[1] == 'running' and r[2] == ARGV[i + 1] and r[3] == ARGV[2] then
    redis.call('ZADD', P .. 'leases', NOW + lease_ms, ARGV[i])
    extend(P .. 'req:' .. ARGV[i], C.grace_ms)
  else
    lost[#lost + 1] = (i - 3) / 2
  end
end
return lost
