--@use base prompts suspects queue life
-- Writes prompts into the records that name them, for members of an earlier release, which know no names of prompts.
-- ARGV: limits, reply_to, then per request id, attempt, delivered, body ('': only asks)
-- Returns per request 1 if its record names its prompt (and, with a body, did so until now), else 0.
-- Guarantees: only live records of this gateway, at that attempt, that published nothing: of any other record the
-- gateway writes the next attempt itself.
local answer = {}
for i = 3, #ARGV, 4 do
  local r = load_record(ARGV[i])
  local live = r and (r.state == 'queued' or r.state == 'claimed' or r.state == 'running') and r.streamed == ''
  local named = live and r.prompt ~= '' and r.reply_to == ARGV[2] and r.attempt == tonumber(ARGV[i + 1])
  if named and ARGV[i + 3] ~= '' then rewrite(r, ARGV[i + 3], ARGV[i + 2], '', '') end
  answer[#answer + 1] = named and 1 or 0
end
return answer
