-- Library (needs base): prompts. Each is stored once however many requests begin with it, and named by its content.
-- prompt:<name> has its token ids (int32, little-endian), prompt_refs:<name> how many records and dead letters need it.
-- An earlier release ends requests without giving their prompts back: those expire when the last request would.

local function has_prompt(name)
  return name == '' or redis.call('EXISTS', P .. 'prompt:' .. name) == 1
end

-- Whether the caller has to send the ids of the prompt, too.
local function lacks_prompt(name, ids)
  return ids == '' and not has_prompt(name)
end

-- Counts one more user of the prompt, which is kept for at least ms. ids are stored where the prompt is missing.
local function take_prompt(name, ids, ms)
  if name == '' then return end
  local prompt, refs = P .. 'prompt:' .. name, P .. 'prompt_refs:' .. name
  if ids ~= '' and not has_prompt(name) then
    redis.call('SET', prompt, ids)
    redis.call('DEL', refs)
  end
  redis.call('INCR', refs)
  extend(prompt, ms)
  extend(refs, ms)
end

local function give_prompt_back(name)
  if name == '' then return end
  if redis.call('DECR', P .. 'prompt_refs:' .. name) <= 0 then
    redis.call('DEL', P .. 'prompt:' .. name, P .. 'prompt_refs:' .. name)
  end
end
