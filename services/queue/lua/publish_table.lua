--@use base seat
-- Replaces the routing table. It is the one entry of a stream whose ids are the epochs, so that a reader who names the
-- epoch it has gets a newer table or nothing, at once or as soon as there is one.
-- ARGV: limits, epoch of the leader, epoch of the table, the table
-- Returns OK, or the error STALETABLE with the highest epoch in use, having changed nothing.
-- Guarantees: epochs rise, also above those that readers brought with them after Redis lost the table; a repeated call
-- is OK.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local epoch, current = tonumber(ARGV[3]), published()
if epoch == current then
  local entry = redis.call('XREVRANGE', P .. 'table', '+', '-', 'COUNT', 1)[1]
  if entry and entry[2][2] == ARGV[4] then return redis.status_reply('OK') end
end
local _, newest = epochs_in_use()
local highest = math.max(current, newest or 0)
if epoch <= highest then return redis.error_reply('STALETABLE ' .. string.format('%.0f', highest)) end
redis.call('XADD', P .. 'table', 'MAXLEN', 1, ARGV[3] .. '-0', 't', ARGV[4], 'wire', C.wire)
redis.call('SET', P .. 'table_epoch', ARGV[3])
return redis.status_reply('OK')
