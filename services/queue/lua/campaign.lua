--@use base
-- Takes the leader's lock if it is free or held under the same token.
-- ARGV: limits, token, ttl ms
-- Returns the new epoch, or 0. Epochs follow Redis TIME, so one that a crash made Redis forget is never used again.
local holder = redis.call('GET', P .. 'leader')
if holder and holder ~= ARGV[2] then return 0 end
local epoch = math.max((tonumber(redis.call('GET', P .. 'leader:epoch')) or 0) + 1, NOW)
redis.call('SET', P .. 'leader', ARGV[2], 'PX', ARGV[3])
redis.call('SET', P .. 'leader:epoch', epoch)
return epoch
