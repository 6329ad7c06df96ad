-- Library: gateways that lag behind what is published for them.

-- What a gateway has handled last, if an entry after it is older than C.lag_ms; else nil, and where it does not say what
-- it handles (release 2d85cd8 and before). Whatever is wrong with its keys, events are published.
local function overdue(gateway)
  local handled = redis.pcall('GET', P .. 'handled:' .. gateway)
  if type(handled) ~= 'string' then return nil end
  local rest = redis.pcall('XRANGE', P .. 'results:' .. gateway, '(' .. handled, NOW - C.lag_ms, 'COUNT', 1)
  return rest[1] and handled
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
