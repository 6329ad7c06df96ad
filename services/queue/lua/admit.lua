--@use base prompts suspects queue life admission idempotency
-- Puts requests of one tenant into the queue: all of them, or none. A long batch takes several calls; the first of them
-- answers for all.
-- ARGV: limits, tenant, reply_to, timeout ms, concurrency, interval ms, burst, requests of later calls (-1: this is one
--       of them, and nothing bounds it), their tokens, Idempotency-Key ('': none), body fingerprint, base id, seed, then
--       per request id, priority, cost, budget (max_tokens), delivered, body, prompt, its ids where this call has not
--       had them yet
-- Returns {'ok', attempt, deadline, attempt, deadline, ...}, {bound, wait in ms, count}, or for a key that is bound
-- {'key', fingerprint, base id, seed, former owner}.
-- Guarantees: an id that has a record is left as it is and reported as it is; a refusal changes nothing and binds no key.
local tenant, reply_to, deadline = ARGV[2], ARGV[3], NOW + tonumber(ARGV[4])
local later = tonumber(ARGV[8])
local bound = ARGV[10] ~= '' and binding(ARGV[10], reply_to, ARGV[11])
if bound and bound[3] ~= ARGV[12] then return bound end
local fresh, tokens, answer = {}, 0, { 'ok' }
for i = 14, #ARGV, 8 do
  local known = redis.call('HMGET', P .. 'req:' .. ARGV[i], 'attempt', 'deadline')
  if not known[1] then
    fresh[#fresh + 1] = i
    tokens = tokens + tonumber(ARGV[i + 2])
  end
  answer[#answer + 1] = tonumber(known[1] or 1)
  answer[#answer + 1] = tonumber(known[2] or deadline)
end
if #fresh == 0 then return answer end
if later >= 0 then
  local refusal = refuse(tenant, #fresh + later, tokens + tonumber(ARGV[9]), { ARGV[5], ARGV[6], ARGV[7] })
  if refusal then return refusal end
end
if ARGV[10] ~= '' then bind(tenant, ARGV[10], reply_to, ARGV[11], ARGV[12], ARGV[13]) end
local ids = {}
for i = 14, #ARGV, 8 do ids[ARGV[i + 6]] = ids[ARGV[i + 6]] or ARGV[i + 7] end
for _, i in ipairs(fresh) do
  create({
    id = ARGV[i], tenant = tenant, priority = ARGV[i + 1], cost = tonumber(ARGV[i + 2]), budget = ARGV[i + 3],
    delivered = ARGV[i + 4], reply_to = reply_to, attempt = 1, deadline = deadline, prompt = ARGV[i + 6],
  }, ARGV[i + 5], ids[ARGV[i + 6]])
end
wake()
return answer
