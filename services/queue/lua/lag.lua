-- Library: gateways that lag behind what is published for them.

-- The last entry that a gateway has handled, if one after it is older than C.lag_ms and its stream takes more than
-- C.lag_bytes; else nil, and where it does not say what it has handled (release 2d85cd8 and before). Whatever is wrong
-- with its keys, events are published.
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
