-- Library (needs base): suspects, requests that may be why their workers die. A request becomes a suspect when a
-- worker dies under which it was unproven, until it proves itself; meanwhile it runs alone, so that it takes no
-- others with it. suspects has the ids of live suspects; a suspect's record has the field suspect '1'.

-- A record's field streamed says how far its attempt got: '' (nothing), 'scores' (of the prompt alone), 'token', '1'
-- (it is proven). A token proves an attempt; after OFTEN failures tokens of two steps do, for decoding may be what
-- kills workers.
local OFTEN = 2
local function got_on(streamed, failures, token)
  if streamed == '1' or not token then return streamed == '' and 'scores' or streamed end
  return (streamed == 'token' or failures < OFTEN) and '1' or 'token'
end

-- How many unproven requests worker holds, and the id of a suspect among them (or false); 0 if there are no suspects.
local function unproven(worker)
  if redis.call('EXISTS', P .. 'suspects') == 0 then return 0, false end
  local count, suspect = 0, false
  for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. worker)) do
    local v = redis.call('HMGET', P .. 'req:' .. id, 'state', 'holder', 'streamed', 'suspect')
    if v[1] == 'running' and v[2] == worker and v[3] ~= '1' then
      count = count + 1
      if v[4] == '1' then suspect = id end
    end
  end
  return count, suspect
end

local function suspect(r)
  redis.call('SADD', P .. 'suspects', r.id)
  redis.call('PEXPIRE', P .. 'suspects', C.grace_ms)
  return '1'
end

local function clear(id)
  redis.call('SREM', P .. 'suspects', id)
  return ''
end
