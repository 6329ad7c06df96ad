--@use base
-- Ends the leases of members whose processes have ended: what they held goes on elsewhere at the scheduler's next look.
-- ARGV: limits, then members: workers, seats, readers of the table
-- Returns how many leases there were.
local ended = 0
for i = 2, #ARGV do
  for _, index in ipairs({ 'workers', 'seats', 'table_readers' }) do
    if redis.call('ZSCORE', P .. index, ARGV[i]) then
      redis.call('ZADD', P .. index, NOW, ARGV[i])
      ended = ended + 1
    end
  end
end
if ended > 0 then wake() end
return ended
