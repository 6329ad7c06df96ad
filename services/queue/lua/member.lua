-- Library (needs base): which model a namespace serves, while members live.
-- An error reply where live members serve another model than fingerprint ('' claims nothing).
local function claim_model(fingerprint, lease_ms)
  if fingerprint == '' then return nil end
  local served = redis.call('GET', P .. 'model')
  if served and served ~= fingerprint then return redis.error_reply('FINGERPRINT ' .. served) end
  redis.call('SET', P .. 'model', fingerprint, 'PX', 2 * lease_ms)
end
