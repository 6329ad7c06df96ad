-- Library (needs base): expert seats, and the epochs of the routing table. All numbers only rise.
-- seats: worker -> end of its lease; seat_numbers: worker -> number; seat:<worker>: what is known of it.
-- seat_changes: worker -> version of its last change; seats_version, seats_gone: of the last change, and the last end.
-- table_readers: worker -> end of its lease; table_epochs: worker -> oldest epoch that it may use.
local YEAR_2026_S = 1767225600

-- A number above all that were given out before, also where Redis forgot them in a crash: it follows Redis TIME, in
-- seconds since 2026 (31 bits last until 2094).
local function above(known)
  return math.max(known + 1, math.floor(NOW / 1000) - YEAR_2026_S)
end

-- Epoch of the table that is published, 0 if there is none.
local function published()
  return tonumber(redis.call('GET', P .. 'table_epoch')) or 0
end

-- Oldest and newest epoch that attention workers use; nil if nobody uses any. The oldest is 0 while readers that Redis
-- forgot may not have reported theirs again.
local function epochs_in_use()
  local first = redis.call('ZRANGE', P .. 'table_epochs', 0, 0, 'WITHSCORES')
  local last = redis.call('ZREVRANGE', P .. 'table_epochs', 0, 0, 'WITHSCORES')
  local oldest = redis.call('EXISTS', P .. 'epochs_lost') == 1 and 0 or tonumber(first[2])
  return oldest, tonumber(last[2])
end

-- The published epoch and the oldest epoch in use, as above, in two calls.
local function published_and_oldest()
  local v = redis.call('MGET', P .. 'table_epoch', P .. 'epochs_lost')
  local first = not v[2] and redis.call('ZRANGE', P .. 'table_epochs', 0, 0, 'WITHSCORES')[2]
  return tonumber(v[1]) or 0, v[2] and 0 or tonumber(first)
end

local function seated(worker)
  return redis.call('ZSCORE', P .. 'seats', worker) and redis.call('EXISTS', P .. 'seat:' .. worker) == 1
end

-- The next version, above all earlier ones, also those that Redis forgot: it follows Redis TIME, in microseconds
-- (53 bits last until 2255).
local function next_version()
  local known = tonumber(redis.call('GET', P .. 'seats_version')) or 0
  local version = string.format('%.0f', math.max(known + 1, TIME[1] * 1000000 + TIME[2]))
  redis.call('SET', P .. 'seats_version', version)
  return version
end

-- Notes that the seats script now answers otherwise for worker.
local function changed(worker)
  redis.call('ZADD', P .. 'seat_changes', next_version(), worker)
end

local function remove_seat(worker)
  redis.call('ZREM', P .. 'seats', worker)
  redis.call('ZREM', P .. 'seat_numbers', worker)
  redis.call('ZREM', P .. 'seat_changes', worker)
  redis.call('DEL', P .. 'seat:' .. worker)
  redis.call('SET', P .. 'seats_gone', next_version())
end

local function remove_reader(worker)
  redis.call('ZREM', P .. 'table_readers', worker)
  redis.call('ZREM', P .. 'table_epochs', worker)
end
