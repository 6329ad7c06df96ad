--@use base prompts suspects queue life
-- Cancels requests of one gateway.
-- ARGV: limits, reply_to, then per request id, delivered (-1: unknown)
-- Returns the number of live requests that ended. Requests of other gateways, and ended ones, are left as they are.
local ended = 0
for i = 3, #ARGV, 2 do
  local r, delivered = load_record(ARGV[i]), tonumber(ARGV[i + 1])
  redis.call('HDEL', P .. 'queue:reserved', ARGV[i]) -- a batch that begins with this request gets no more calls
  if r and r.state ~= 'done' and r.reply_to == ARGV[2] then
    cancel(r, 1, delivered >= 0 and delivered or nil)
    ended = ended + 1
  end
end
return ended
