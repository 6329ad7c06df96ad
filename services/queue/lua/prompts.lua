-- Library (needs base): prompts, each stored once however many requests begin with it, and named by what is in it.
-- prompt:<name> has its token ids (int32, little-endian), prompt_refs:<name> how many records and dead letters need it.
-- An earlier release ends requests without giving their prompts back: those go when the last request would expire.

local function has_prompt(name)
  return name == '' or redis.call('EXISTS', P .. 'prompt:' .. name) == 1
end

-- Whether the caller has to send the ids, too.
local function lacks_prompt(name, ids)
  return ids == '' and not has_prompt(name)
end

-- One more needs the prompt, for so many ms at least. ids are stored where it is not there.
local function take_prompt(name, ids, ms)
  if name == '' then return end
  local prompt, refs = P .. 'prompt:' .. name, P .. 'prompt_refs:' .. name
  if ids ~= '' and not has_prompt(name) then
    redis.call('SET', prompt, ids)
    redis.call('DEL', refs)
  end
  redis.call('INCR', refs)
  for _, key in ipairs({ prompt, refs }) do
    if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
  end
end

local function give_prompt_back(name)
  if name == '' then return end
  if redis.call('DECR', P .. 'prompt_refs:' .. name) <= 0 then
    redis.call('DEL', P .. 'prompt:' .. name, P .. 'prompt_refs:' .. name)
  end
end
