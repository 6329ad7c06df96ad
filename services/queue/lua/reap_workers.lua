--@use base prompts queue life reclaim
-- Removes workers whose lease expired and takes back all that they held.
-- ARGV: limits, epoch, most requests
-- Returns {workers removed, lost, dead, 1 if more is left}. On hold nothing happens.
local fenced = stale(ARGV[2])
if fenced then return fenced end
if on_hold() then return { 0, 0, 0, 0 } end
local left, removed, count = tonumber(ARGV[3]), 0, { lost = 0, dead = 0 }
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', '-inf', NOW, 'LIMIT', 0, left)) do
  local held = P .. 'held:' .. worker
  for _, id in ipairs(redis.call('HKEYS', held)) do
    if left <= 0 then break end
    left = left - 1
    local r = load_record(id)
    if r and r.state == 'running' and r.holder == worker then
      local outcome = lose(r, 'worker lost', 1)
      count[outcome] = count[outcome] + 1
    end
    redis.call('HDEL', held, id)
  end
  if redis.call('EXISTS', held) == 0 then
    remove_worker(worker)
    removed = removed + 1
  end
end
return { removed, count.lost, count.dead, left <= 0 and 1 or 0 }
