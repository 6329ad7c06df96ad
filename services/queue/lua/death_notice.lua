--@use base prompts suspects queue life
-- Takes back what members held whose processes have ended: requests now, as when a lease expires; seats, and readers of
-- the table, at the scheduler's next look.
-- ARGV: limits, then members: workers, seats, readers of the table
-- Returns how many of these there were.
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
return ended
