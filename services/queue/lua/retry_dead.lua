--@use base prompts suspects queue life
-- Admits a dead letter's prompt again, with no failures counted, past the bounds.
-- ARGV: limits, id, reply_to, deadline offset ms, tenant, priority, cost, budget, body, prompt
-- Returns {attempt, deadline}, or nil if there is no such dead letter.
local attempt = tonumber(redis.call('HGET', P .. 'dead:' .. ARGV[2], 'attempt'))
if not attempt then return nil end
local r = {
  id = ARGV[2], reply_to = ARGV[3], deadline = NOW + tonumber(ARGV[4]), tenant = ARGV[5], priority = ARGV[6],
  cost = tonumber(ARGV[7]), budget = ARGV[8], delivered = 0, attempt = attempt + 1, prompt = ARGV[10],
}
redis.call('DEL', P .. 'req:' .. r.id)
create(r, ARGV[9], '')
unbury(r.id)
wake()
return { r.attempt, r.deadline }
