--@use base
-- Removes a gateway that owns no live request; one that does keeps its lease until that expires.
-- ARGV: limits, incarnation
-- Returns the number of live requests it owns.
local owned = redis.call('SCARD', P .. 'owned:' .. ARGV[2])
if owned == 0 then
  redis.call('ZREM', P .. 'gateways', ARGV[2])
  redis.call('DEL', P .. 'results:' .. ARGV[2], P .. 'handled:' .. ARGV[2])
end
return owned
