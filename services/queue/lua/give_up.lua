--@use base prompts suspects queue life
-- Ends attempts that a worker cannot go on with, although it lives: experts that they need cannot be reached.
-- ARGV: limits, worker, error (msgpack ErrorInfo), then per request id, attempt
-- Returns {requeued, lost, failed}. Attempts that are not the worker's any more are left alone.
-- Guarantees: each counts as a failed attempt. What streamed nothing is queued as the same attempt, the rest becomes
-- AttemptLost; at the cap of attempts the request ends with the error, which is not its fault: no dead letter.
local worker, requeued, lost, failed = ARGV[2], 0, 0, 0
for i = 4, #ARGV, 2 do
  local r = load_record(ARGV[i])
  if r and r.state == 'running' and r.holder == worker and r.attempt == tonumber(ARGV[i + 1]) then
    if r.failures + 1 >= C.max_attempts then
      refund(r, r.cost)
      fail(r, ARGV[3])
      failed = failed + 1
    elseif r.streamed == '' then
      set(r, 'failures', r.failures + 1)
      requeue(r)
      requeued = requeued + 1
    else
      lose(r, 'experts unavailable', 1)
      lost = lost + 1
    end
  end
end
rebalance_undone()
if requeued > 0 then wake() end
return { requeued, lost, failed }
