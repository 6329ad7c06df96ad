--@use base member
-- Takes the leader's lock if it is free or held under the same token.
-- ARGV: limits, token, ttl ms, 1 if it asked less than a lease ago
-- Returns the new epoch, or 0, or the error WIRE. Epochs follow Redis TIME, so an epoch that Redis forgot in a crash
-- is never used again. leader:wire says which version the leader of that epoch reads; an earlier release does not
-- write it.
local mismatch = claim_wire(C.lease_ms, ARGV[4] == '1' and NOW + 1 or 0)
if mismatch then return mismatch end
local holder = redis.call('GET', P .. 'leader')
if holder and holder ~= ARGV[2] then return 0 end
local epoch = math.max((tonumber(redis.call('GET', P .. 'leader:epoch')) or 0) + 1, NOW)
redis.call('SET', P .. 'leader', ARGV[2], 'PX', ARGV[3])
redis.call('SET', P .. 'leader:epoch', epoch)
redis.call('HSET', P .. 'leader:wire', 'epoch', epoch, 'wire', C.wire)
return epoch
