-- Library (needs base): expert seats, and the epochs of the routing table. All numbers only rise.
-- seats: worker -> end of its lease; seat_numbers: worker -> number; seat:<worker>: what is known of it.
-- table_readers: worker -> end of its lease; table_epochs: worker -> oldest epoch that it may use.
local YEAR_2026_S = 1767225600

-- A number above every one given out before, also where a crash made Redis forget them: it follows Redis TIME, in
-- seconds since 2026 (31 bits last until 2094).
local function above(known)
  return math.max(known + 1, math.floor(NOW / 1000) - YEAR_2026_S)
end

-- Epoch of the table that is published, 0 if there is none.
local function published()
  return tonumber(redis.call('GET', P .. 'table_epoch')) or 0
end

-- Oldest and newest epoch that attention workers use; nil if nobody uses any. The oldest is 0 while readers that Redis
-- forgot may not have said theirs again.
local function epochs_in_use()
  local first = redis.call('ZRANGE', P .. 'table_epochs', 0, 0, 'WITHSCORES')
  local last = redis.call('ZREVRANGE', P .. 'table_epochs', 0, 0, 'WITHSCORES')
  local oldest = redis.call('EXISTS', P .. 'epochs_lost') == 1 and 0 or tonumber(first[2])
  return oldest, tonumber(last[2])
end

local function seated(worker)
  return redis.call('ZSCORE', P .. 'seats', worker) and redis.call('EXISTS', P .. 'seat:' .. worker) == 1
end

local function remove_seat(worker)
  redis.call('ZREM', P .. 'seats', worker)
  redis.call('ZREM', P .. 'seat_numbers', worker)
  redis.call('DEL', P .. 'seat:' .. worker)
end

local function remove_reader(worker)
  redis.call('ZREM', P .. 'table_readers', worker)
  redis.call('ZREM', P .. 'table_epochs', worker)
end
