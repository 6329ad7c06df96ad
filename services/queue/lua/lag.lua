-- Library: gateways that lag behind what is published for them.

-- The id of the last entry that a gateway has handled if the gateway lags, else nil. A gateway lags when its stream
-- takes more than C.lag_bytes and has an entry older than C.lag_ms that is not handled. A gateway that has not
-- reported lately what it has handled (release 2d85cd8 never does), or whose keys are damaged, does not lag: events
-- are published.
local function overdue(gateway)
  local handled, results = redis.pcall('GET', P .. 'handled:' .. gateway), P .. 'results:' .. gateway
  if type(handled) ~= 'string' then return nil end
  if not redis.pcall('XRANGE', results, '(' .. handled, NOW - C.lag_ms, 'COUNT', 1)[1] then return nil end
  return redis.call('MEMORY', 'USAGE', results, 'SAMPLES', 0) > C.lag_bytes and handled
end

-- A flat list: each of the gateways that lags, and the last entry that it has handled.
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
