--@use base lag
-- Which gateways lag. Changes nothing.
-- ARGV: limits, gateways
-- Returns each of them that lags, and after it the last entry that it has handled.
local gateways = {}
for i = 2, #ARGV do gateways[#gateways + 1] = ARGV[i] end
return lagging(gateways)
