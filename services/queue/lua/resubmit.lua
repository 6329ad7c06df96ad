--@use base queue life
-- Queues the next attempt of a request at its original place.
-- ARGV: limits, id, attempt, reply_to, tenant, priority, cost, budget, delivered, deadline, body
-- Returns 1 if that attempt is queued or under way; 0 if the request ended, moved to another gateway or is past it.
-- Guarantees: an older attempt is fenced off; a record that Redis lost is created again.
local r, attempt = load_record(ARGV[2]), tonumber(ARGV[3])
if not r then
  create({
    id = ARGV[2], attempt = attempt, reply_to = ARGV[4], tenant = ARGV[5], priority = ARGV[6], cost = tonumber(ARGV[7]),
    budget = ARGV[8], delivered = ARGV[9], deadline = tonumber(ARGV[10]),
  }, ARGV[11])
  wake()
  return 1
end
if r.state == 'done' or r.reply_to ~= ARGV[4] or r.attempt > attempt then return 0 end
if r.attempt == attempt and r.state ~= 'lost' then return 1 end
if r.state == 'running' then tell_worker(r) end
if r.state == 'running' or r.state == 'claimed' then refund(r, r.cost) end
detach(r)
r.attempt = attempt
set(r, 'body', ARGV[11], 'delivered', ARGV[9])
enqueue(r, 0)
wake()
return 1
