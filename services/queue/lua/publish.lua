--@use base lag prompts suspects queue life admission
-- Writes one engine step's events: one stream entry per gateway, with one field per request.
-- ARGV: limits, worker, then per request id, attempt, generated tokens if it ends here (else -1, or -2 if the events
-- have no token), events (msgpack)
-- Returns the index of each request that was refused (gone, ended, at another attempt or another holder's), and which
-- of the gateways that were written to lag (see lag.lua).
-- Guarantees: events and end are one atomic step; refused events are written nowhere.
local worker, refused, entries, ended = ARGV[2], {}, {}, {}
for i = 3, #ARGV, 4 do
  local id, attempt = ARGV[i], ARGV[i + 1]
  local v = redis.call('HMGET', P .. 'req:' .. id, 'state', 'attempt', 'holder', 'reply_to', 'streamed', 'failures')
  if v[1] == 'running' and v[2] == attempt and v[3] == worker then
    local entry = entries[v[4]] or {}
    entries[v[4]] = entry
    entry[#entry + 1] = id
    entry[#entry + 1] = ARGV[i + 3]
    local streamed = got_on(v[5], tonumber(v[6]) or 0, ARGV[i + 2] ~= '-2')
    if streamed ~= v[5] then redis.call('HSET', P .. 'req:' .. id, 'streamed', streamed) end -- a full server refuses it
    if streamed == '1' and v[5] ~= '1' then
      redis.call('HSET', P .. 'req:' .. id, 'suspect', '')
      clear(id)
    end
    if tonumber(ARGV[i + 2]) >= 0 then ended[#ended + 1] = i end
  else
    refused[#refused + 1] = (i - 3) / 4
  end
end
local gateways = {}
for gateway, entry in pairs(entries) do
  append_results(gateway, unpack(entry))
  gateways[#gateways + 1] = gateway
end
for _, i in ipairs(ended) do
  local r = load_record(ARGV[i])
  detach(r)
  refund(r, r.budget - tonumber(ARGV[i + 2]))
  note_ended(r)
  conclude(r, 0)
end
return { refused, lagging(gateways) }
