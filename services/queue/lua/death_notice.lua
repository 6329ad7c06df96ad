--@use base prompts suspects queue life
-- Ends the leases of members whose processes have ended. What workers held is taken back now, as when a lease expires;
-- the scheduler removes seats and readers of the table when it looks next.
-- ARGV: limits, then ids of members: workers, seats, readers of the table
-- Returns how many such members there were, and what became of requests (see life.lua).
local ended = 0
for i = 2, #ARGV do
  local member = ARGV[i]
  local _, removed = bereave(member, math.huge)
  if removed then ended = ended + 1 end
  for _, index in ipairs({ 'seats', 'table_readers' }) do
    if redis.call('ZSCORE', P .. index, member) then
      redis.call('ZADD', P .. index, NOW, member)
      ended = ended + 1
    end
  end
end
rebalance_undone()
if ended > 0 then wake() end
return { ended, fates }
