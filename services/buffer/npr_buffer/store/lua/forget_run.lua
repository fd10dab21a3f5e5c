-- Removes a run from the index unless it was touched since the caller read its generation. KEYS: index.
-- ARGV: run id, generation. Returns 1 if it was removed.
local generation = redis.call('ZSCORE', KEYS[1], ARGV[1])
if generation and tonumber(generation) == tonumber(ARGV[2]) then
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
return 0
