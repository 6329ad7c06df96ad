--@use base prompts suspects queue life admission idempotency
-- Puts requests of one tenant into the queue: all of them, or none. A long batch takes several calls; the first of them
-- answers for all.
-- ARGV: limits, tenant, reply_to, timeout ms, concurrency, interval ms, burst, requests of later calls, their tokens,
--       id of the batch's first request (the call that has it is the first; nothing bounds the others),
--       Idempotency-Key ('': none), body fingerprint, base id, seed, then per request id, priority, cost, budget
--       (max_tokens), delivered, body, prompt, its ids where this call has not had them yet
-- Returns {'ok', attempt, deadline, attempt, deadline, ...}, {bound, wait in ms, count}, or for a key that is bound
-- {'key', fingerprint, base id, seed, former owner}.
-- Guarantees: an id that has a record is left and reported as it is; a refusal changes nothing and binds no key.
local tenant, reply_to, deadline = ARGV[2], ARGV[3], NOW + tonumber(ARGV[4])
local later, later_tokens, batch = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local first = ARGV[15] == batch
local bound = ARGV[11] ~= '' and binding(ARGV[11], reply_to, ARGV[12])
if bound and bound[3] ~= ARGV[13] then return bound end
local fresh, tokens, answer = {}, 0, { 'ok' }
for i = 15, #ARGV, 8 do
  local known = redis.call('HMGET', P .. 'req:' .. ARGV[i], 'attempt', 'deadline')
  if not known[1] then
    fresh[#fresh + 1] = i
    tokens = tokens + tonumber(ARGV[i + 2])
  end
  answer[#answer + 1] = tonumber(known[1] or 1)
  answer[#answer + 1] = tonumber(known[2] or deadline)
end
if #fresh == 0 then return answer end
if first then
  local limits, count = { ARGV[5], ARGV[6], ARGV[7] }, #fresh + later
  local refusal = refuse(tenant, count, tokens + later_tokens, limits, batch, { count - 1, count, 0 })
  if refusal then return refusal end
end
if later > 0 or not first then reserve(batch, later, later_tokens, tenant) end
if ARGV[11] ~= '' then bind(tenant, ARGV[11], reply_to, ARGV[12], ARGV[13], ARGV[14]) end
local ids = {}
for i = 15, #ARGV, 8 do ids[ARGV[i + 6]] = ids[ARGV[i + 6]] or ARGV[i + 7] end
for _, i in ipairs(fresh) do
  create({
    id = ARGV[i], tenant = tenant, priority = ARGV[i + 1], cost = tonumber(ARGV[i + 2]), budget = ARGV[i + 3],
    delivered = ARGV[i + 4], reply_to = reply_to, attempt = 1, deadline = deadline, prompt = ARGV[i + 6],
  }, ARGV[i + 5], ids[ARGV[i + 6]])
end
wake()
return answer
