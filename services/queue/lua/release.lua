--@use base prompts suspects queue life
-- Puts claimed requests back at their places (error '': no error), or ends them with an error.
-- ARGV: limits, epoch, error (msgpack ErrorInfo or ''), id ...
-- Returns the number of requests that were still the leader's.
local fenced = stale(ARGV[2])
if fenced then return fenced end
local count = 0
for i = 4, #ARGV do
  local r = load_record(ARGV[i])
  if r and r.state == 'claimed' and r.holder == ARGV[2] then
    count = count + 1
    if ARGV[3] == '' then
      requeue(r)
    else
      refund(r, r.cost)
      fail(r, ARGV[3])
    end
  end
end
rebalance_undone()
return count
