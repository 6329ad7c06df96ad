--@use base prompts suspects queue life
-- Ends an attempt of which the gateway misses events.
-- ARGV: limits, id, attempt, reply_to, 1 to take it from another gateway
-- Returns the attempt to resubmit as, or 0 if the request was cancelled or is another gateway's.
-- Guarantees: the attempt can publish nothing more; it does not count as a failure.
local r, attempt = load_record(ARGV[2]), tonumber(ARGV[3])
if not r then return attempt + 1 end
if r.reply_to ~= ARGV[4] then
  if ARGV[5] ~= '1' then return 0 end
  if r.state ~= 'done' then move(r, ARGV[4]) end
elseif r.cancelled == '1' then
  return 0
end
if r.state == 'done' then
  redis.call('DEL', P .. 'req:' .. r.id) -- ended, but its end never arrived: resubmit will create it again
  return math.max(r.attempt, attempt) + 1
end
if r.state == 'lost' and r.attempt > attempt then return r.attempt end
withdraw(r)
r.attempt = math.max(r.attempt, attempt) + 1
set(r, 'state', 'lost', 'attempt', r.attempt, 'holder', '', 'streamed', '')
redis.call('ZADD', P .. 'leases', NOW + C.lost_ms, r.id)
return r.attempt
