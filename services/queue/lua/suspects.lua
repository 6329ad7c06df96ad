-- Library (needs base): requests that may be why their workers die. A request is one from the death of a worker that had
-- sent no token of it until there is a token; meanwhile it runs alone, so that it takes no others with it.
-- suspects has the ids of those that live; a record's suspect is '1'.

-- Requests that worker holds and has sent no token of, and whether one of them is a suspect; 0 while there are none at all.
local function unproven(worker)
  if redis.call('EXISTS', P .. 'suspects') == 0 then return 0, false end
  local count, suspect = 0, false
  for _, id in ipairs(redis.call('HKEYS', P .. 'held:' .. worker)) do
    local v = redis.call('HMGET', P .. 'req:' .. id, 'state', 'holder', 'streamed', 'suspect')
    if v[1] == 'running' and v[2] == worker and v[3] == '' then
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
