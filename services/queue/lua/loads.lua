--@use base
-- Lists the loads that attention workers and gateways under lease reported.
-- ARGV: limits
-- Returns {{worker, load ('': none), worker, load ...}, {gateway, load ...}}: gateways that reported any.
local workers, gateways = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', NOW, '+inf')) do
  workers[#workers + 1] = id
  workers[#workers + 1] = redis.call('GET', P .. 'load:' .. id) or ''
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'gateways', NOW, '+inf')) do
  local load = redis.call('GET', P .. 'load:' .. id)
  if load then
    gateways[#gateways + 1] = id
    gateways[#gateways + 1] = load
  end
end
return { workers, gateways }
