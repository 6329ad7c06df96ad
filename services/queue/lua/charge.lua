--@use base admission
-- Charges a tenant's rate with one request that has come, before its body is read.
-- ARGV: limits, tenant, ms between requests, burst
-- Returns {'ok'} or {'rate', wait in ms, 0}; a refusal changes nothing.
local refusal = refuse_rate(ARGV[2], 1, tonumber(ARGV[3]), tonumber(ARGV[4]))
if not refusal then return { 'ok' } end
refusal[2] = math.ceil(refusal[2])
return refusal
