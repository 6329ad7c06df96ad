--@use base prompts queue
-- Lists what Redis knows of a gateway's requests, and repairs the indexes that make them progress.
-- ARGV: limits, reply_to, id ...
-- Returns state, attempt, state, attempt, ... (state missing or moved where the record is gone or another gateway's).
-- Guarantees: a queued request is in its queue and any other live one under a lease, so it will be served or reaped.
local answer = {}
for i = 3, #ARGV do
  local r = load_record(ARGV[i])
  local state = r and r.state or 'missing'
  if r and r.reply_to ~= ARGV[2] then
    state = 'moved'
  elseif state == 'queued' then
    if not redis.call('ZSCORE', queue_key(r), member(r)) or not redis.call('ZSCORE', P .. 'deadlines', r.id)
      or redis.call('HEXISTS', P .. 'deficit:' .. r.priority, r.tenant) == 0 then
      enqueue(r, 0)
      wake()
    end
  elseif r and state ~= 'done' then
    redis.call('ZADD', P .. 'leases', 'NX', NOW + C.lease_ms, r.id)
  end
  answer[#answer + 1] = state
  answer[#answer + 1] = r and r.attempt or 0
end
return answer
