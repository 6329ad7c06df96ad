--@use base
-- Lists the seats that were not reaped. An expired lease does not end a seat: Redis may have been away.
-- ARGV: limits, version that the caller knows (0: none)
-- Returns {version, 1 if these are all and not only changes, 1 if a seat ended since, then {number of each that is
-- there, ...} (empty if none ended), {{number, info, status, report ('': none yet), 1 if dismissed, digest of its
-- assignment ('': none)}, ...}}.
local known = tonumber(ARGV[2])
local version = tonumber(redis.call('GET', P .. 'seats_version')) or 0
local gone = tonumber(redis.call('GET', P .. 'seats_gone')) or 0
local all = known == 0 or version < known
local numbers, rows = {}, {}

local function add(worker, number)
  local v = redis.call('HMGET', P .. 'seat:' .. worker, 'info', 'status', 'report', 'dismissed', 'digest')
  if v[1] then rows[#rows + 1] = { tonumber(number), v[1], v[2], v[3] or '', v[4] and 1 or 0, v[5] or '' } end
end

if all or gone > known then
  local flat = redis.call('ZRANGE', P .. 'seat_numbers', 0, -1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    if all then add(flat[i], flat[i + 1]) else numbers[#numbers + 1] = tonumber(flat[i + 1]) end
  end
end
if not all then
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'seat_changes', string.format('(%.0f', known), '+inf')) do
    add(worker, redis.call('ZSCORE', P .. 'seat_numbers', worker))
  end
end
return { string.format('%.0f', version), all and 1 or 0, gone > known and 1 or 0, numbers, rows }
