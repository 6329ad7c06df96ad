-- Library: gateways that lag behind what is published for them.

-- Whether a gateway lags: its stream takes more than C.lag_bytes and has an entry that it has not handled and that is
-- older than C.lag_ms by now. Returns the id of the last entry that it has handled, or nil where it does not lag. Nil,
-- too, where it has not said lately what it has handled (one of release 2d85cd8 never does), and where its keys are
-- damaged: events are published all the same.
local function overdue(gateway)
  local handled, results = redis.pcall('GET', P .. 'handled:' .. gateway), P .. 'results:' .. gateway
  if type(handled) ~= 'string' then return nil end
  if not redis.pcall('XRANGE', results, '(' .. handled, NOW - C.lag_ms, 'COUNT', 1)[1] then return nil end
  return redis.call('MEMORY', 'USAGE', results, 'SAMPLES', 0) > C.lag_bytes and handled
end

-- As a flat list, each of gateways that lags and the last entry that it has handled.
local function lagging(gateways)
  local found = {}
  for _, gateway in ipairs(gateways) do
    local handled = overdue(gateway)
    if handled then
      found[#found + 1] = gateway
      found[#found + 1] = handled
    end
  end
  return found
end
