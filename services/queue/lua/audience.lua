--@use base
-- Lists who reads what a gateway writes.
-- ARGV: limits
-- Returns {newest version that the leader reads (0: nobody leads), {worker, its info, worker, its info, ...}}: workers
-- whose lease is live.
local led = redis.call('MGET', P .. 'leader', P .. 'leader:epoch')
local v = redis.call('HMGET', P .. 'leader:wire', 'epoch', 'wire')
local current = v[1] and tonumber(v[1]) == tonumber(led[2] or 0)
local workers = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', NOW, '+inf')) do
  local info = redis.pcall('HGET', P .. 'worker:' .. id, 'info')
  if type(info) == 'string' then
    workers[#workers + 1] = id
    workers[#workers + 1] = info
  end
end
return { led[1] and (current and tonumber(v[2]) or 1) or 0, workers }
