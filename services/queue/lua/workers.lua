--@use base
-- Lists workers whose lease is live.
-- ARGV: limits
-- Returns {{info, outstanding tokens, outstanding requests, credit tokens, credit requests}, ...}.
local answer = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', NOW, '+inf')) do
  local v = redis.call('HMGET', P .. 'worker:' .. id, 'info', 'outstanding_tokens', 'credit_tokens', 'credit_requests')
  if v[1] then
    answer[#answer + 1] = {
      v[1], tonumber(v[2]) or 0, redis.call('HLEN', P .. 'held:' .. id), tonumber(v[3]), tonumber(v[4]),
    }
  end
end
return answer
