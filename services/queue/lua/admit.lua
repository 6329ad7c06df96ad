--@use base queue life admission
-- Puts requests of one tenant into the queue: all of them, or none.
-- ARGV: limits, tenant, reply_to, timeout ms, concurrency, interval ms, burst, then per request id, priority, cost,
--       budget (max_tokens), delivered, body
-- Returns {'ok', attempt, deadline, attempt, deadline, ...} or {bound, wait in ms, count}.
-- Guarantees: an id that has a record is left as it is and reported as it is; a refusal changes nothing.
local tenant, reply_to, deadline = ARGV[2], ARGV[3], NOW + tonumber(ARGV[4])
local fresh, tokens, answer = {}, 0, { 'ok' }
for i = 8, #ARGV, 6 do
  local known = redis.call('HMGET', P .. 'req:' .. ARGV[i], 'attempt', 'deadline')
  if not known[1] then
    fresh[#fresh + 1] = i
    tokens = tokens + tonumber(ARGV[i + 2])
  end
  answer[#answer + 1] = tonumber(known[1] or 1)
  answer[#answer + 1] = tonumber(known[2] or deadline)
end
if #fresh == 0 then return answer end
local refusal = refuse(tenant, #fresh, tokens, { ARGV[5], ARGV[6], ARGV[7] })
if refusal then return refusal end
for _, i in ipairs(fresh) do
  create({
    id = ARGV[i], tenant = tenant, priority = ARGV[i + 1], cost = tonumber(ARGV[i + 2]), budget = ARGV[i + 3],
    delivered = ARGV[i + 4], reply_to = reply_to, attempt = 1, deadline = deadline,
  }, ARGV[i + 5])
end
wake()
return answer
