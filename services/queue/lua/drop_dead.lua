--@use base prompts suspects queue life
-- Forgets a dead letter.
-- ARGV: limits, id
-- Returns 1, or 0 if there is no such dead letter.
return unbury(ARGV[2]) and 1 or 0
