--@use base
-- Prolongs (ttl > 0) or gives up (ttl 0) the leader's lock.
-- ARGV: limits, epoch, token, ttl ms
-- Returns 1, or 0 if another epoch leads. A lock that ran out is taken again: nobody else was elected meanwhile.
if redis.call('GET', P .. 'leader:epoch') ~= ARGV[2] then return 0 end
if tonumber(ARGV[4]) > 0 then
  redis.call('SET', P .. 'leader', ARGV[3], 'PX', ARGV[4])
else
  redis.call('DEL', P .. 'leader')
end
return 1
