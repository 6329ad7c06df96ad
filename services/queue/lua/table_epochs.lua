--@use base seat
-- Lists the epochs of the routing table.
-- ARGV: limits
-- Returns {published (0: none), oldest in use, newest in use (-1: none), the epoch that the next table may take}.
local oldest, newest = epochs_in_use()
local current = published()
return { current, oldest or -1, newest or -1, above(math.max(current, newest or 0)) }
