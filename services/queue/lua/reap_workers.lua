--@use base prompts suspects queue life reclaim
-- Removes workers whose lease expired and takes back all that they held.
-- ARGV: limits, epoch, most requests
-- Returns {workers removed, lost, dead, 1 if more is left, what became of requests (see life.lua)}. On hold nothing happens.
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 0, 0, 0, 0, {} } end
local left, gone, lost, dead = tonumber(ARGV[3]), 0, 0, 0
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', NOW, 'LIMIT', 0, left)) do
  local count, removed
  count, removed, left = bereave(worker, left)
  lost, dead = lost + count.lost, dead + count.dead
  if removed then gone = gone + 1 end
end
return { gone, lost, dead, left <= 0 and 1 or 0, fates }
