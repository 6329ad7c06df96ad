--@use base prompts suspects queue life admission
-- Moves a request to another gateway, whose client came back with the same Idempotency-Key.
-- ARGV: limits, id, reply_to, timeout ms, concurrency, interval ms, burst, tenant, priority, cost, budget, body,
-- prompt, its ids ('': it may be there), its place among those that came together (0: the first), how many these are
-- Returns {'ok', attempt, deadline}, {bound, wait in ms, count}, or {'prompt'} where that has to be sent, too.
-- Guarantees: a request that published nothing keeps attempt and place; any other starts from scratch as a later
-- attempt; one that ended or is unknown is admitted under the limits, and charged unless it is the first. The former
-- gateway gets 'cancelled'.
local reply_to, deadline = ARGV[3], NOW + tonumber(ARGV[4])
if lacks_prompt(ARGV[13], ARGV[14]) then return { 'prompt' } end
local r = load_record(ARGV[2])
if not r or r.state == 'done' then
  local limits, place, of = { ARGV[5], ARGV[6], ARGV[7] }, tonumber(ARGV[15]), tonumber(ARGV[16])
  local charge = { math.min(place, 1), of, of - place - 1 } -- so the first is refused, rather than one in their midst
  local batch = string.gsub(ARGV[2], '%-%d+$', '-0') -- its gateway may have reserved room for the rest of the batch
  local refusal = refuse(ARGV[8], 1, tonumber(ARGV[10]), limits, batch, charge)
  if refusal then return refusal end
  local attempt = r and r.attempt + 1 or 1
  redis.call('DEL', P .. 'req:' .. ARGV[2])
  create({
    id = ARGV[2], attempt = attempt, reply_to = reply_to, tenant = ARGV[8], priority = ARGV[9],
    cost = tonumber(ARGV[10]), budget = ARGV[11], delivered = 0, deadline = deadline, prompt = ARGV[13],
  }, ARGV[12], ARGV[14])
  wake()
  return { 'ok', attempt, deadline }
end
if r.reply_to ~= reply_to then move(r, reply_to) end
local untouched = r.streamed == '' and r.delivered == 0
if untouched and r.state ~= 'lost' then return { 'ok', r.attempt, r.deadline } end
if untouched then
  detach(r)
else
  withdraw(r)
  r.attempt = r.attempt + 1
end
if r.deadline <= NOW then r.deadline = deadline end
set(r, 'deadline', r.deadline)
rewrite(r, ARGV[12], 0, ARGV[13], ARGV[14])
enqueue(r, 0)
wake()
return { 'ok', r.attempt, r.deadline }
