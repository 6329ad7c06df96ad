-- Library (needs base): requests that may be why their workers die. A request is one from the death of a worker under
-- which it had not got on until it does; meanwhile it runs alone, so that it takes no others with it.
-- suspects has the ids of those that live; a record's suspect is '1'.

-- How far an attempt has got is its record's streamed: '' (nothing), 'scores' (of the prompt alone), 'token', '1' (it gets on).
-- That takes one token; of a request that failed this often, tokens of two steps, as it may be decoding that ends its workers.
local OFTEN = 2
local function got_on(streamed, failures, token)
  if streamed == '1' or not token then return streamed == '' and 'scores' or streamed end
  return (streamed == 'token' or failures < OFTEN) and '1' or 'token'
end

-- Requests that worker holds and that have not got on, and whether one of them is a suspect; 0 while there are none at all.
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
