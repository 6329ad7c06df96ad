--@use base prompts suspects queue life
-- Queues the next attempt of a request at its original place.
-- ARGV: limits, id, attempt, reply_to, tenant, priority, cost, budget, delivered, deadline, body, prompt, its ids
-- ('': it may be there)
-- Returns 1 if that attempt is queued or under way; 0 if the request ended, moved to another gateway or has a later
-- attempt; -1 where the prompt has to be sent, too.
-- Guarantees: an older attempt is fenced off; a record that Redis lost is created again.
local r, attempt = load_record(ARGV[2]), tonumber(ARGV[3])
if lacks_prompt(ARGV[12], ARGV[13]) then return -1 end
if not r then
  create({
    id = ARGV[2], attempt = attempt, reply_to = ARGV[4], tenant = ARGV[5], priority = ARGV[6], cost = tonumber(ARGV[7]),
    budget = ARGV[8], delivered = ARGV[9], deadline = tonumber(ARGV[10]), prompt = ARGV[12],
  }, ARGV[11], ARGV[13])
  wake()
  return 1
end
if r.state == 'done' or r.reply_to ~= ARGV[4] or r.attempt > attempt then return 0 end
if r.attempt == attempt and r.state ~= 'lost' then return 1 end
withdraw(r)
r.attempt = attempt
rewrite(r, ARGV[11], ARGV[9], ARGV[12], ARGV[13])
enqueue(r, 0)
wake()
return 1
