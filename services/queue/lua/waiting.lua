--@use base queue
-- Counts what waits, for metrics. Of a long line it reads the first members, and takes the others to cost as much.
-- ARGV: limits, most members to read of one line, most to read of all
-- Returns {ms that a request which is first in its line has waited, the longest, {{priority, tenant, requests, tokens},
-- ...}}. At least one member of each line is read.
local each, left = tonumber(ARGV[2]), tonumber(ARGV[3])
local lines, longest = {}, 0

local function read(priority, tenant)
  local queue = P .. 'queue:' .. priority .. ':' .. tenant
  local count = redis.call('ZCARD', queue)
  if count == 0 then return end
  local members = redis.call('ZRANGE', queue, 0, math.max(1, math.min(each, left)) - 1)
  left = left - #members
  local tokens = 0
  for _, found in ipairs(members) do tokens = tokens + tonumber(string.match(found, '^%d+:(%d+):')) end
  lines[#lines + 1] = { priority, tenant, count, math.floor(tokens * count / #members + 0.5) }
  local id = string.match(members[1], '^%d+:%d+:(.*)$')
  local since = tonumber(redis.call('HGET', P .. 'req:' .. id, 'queued_at') or '') or NOW
  longest = math.max(longest, NOW - since)
end

for priority = 0, 9 do
  for _, tenant in ipairs(redis.call('LRANGE', P .. 'ring:' .. priority, 0, -1)) do read(priority, tenant) end
end
return { longest, lines }
