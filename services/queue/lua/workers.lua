--@use base suspects
-- Lists workers whose lease is live.
-- ARGV: limits
-- Returns {{id, info, outstanding tokens, outstanding requests, credit tokens, credit requests, unproven requests
-- (counted while there are suspects), 1 if one of those is a suspect}, ...}, without workers whose record is damaged.
local answer = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', NOW, '+inf')) do
  local v = redis.pcall('HMGET', P .. 'worker:' .. id, 'info', 'outstanding_tokens', 'credit_tokens', 'credit_requests')
  if v[1] then
    local open, alone = unproven(id)
    answer[#answer + 1] = {
      id, v[1], tonumber(v[2]) or 0, redis.call('HLEN', P .. 'held:' .. id), tonumber(v[3]) or 0, tonumber(v[4]) or 0,
      open, alone and 1 or 0,
    }
  end
end
return answer
