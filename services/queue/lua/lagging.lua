--@use base lag
-- Finds out which gateways lag. Changes nothing.
-- ARGV: limits, gateways
-- Returns each gateway that lags, followed by the last entry that it has handled.
local gateways = {}
for i = 2, #ARGV do gateways[#gateways + 1] = ARGV[i] end
return lagging(gateways)
