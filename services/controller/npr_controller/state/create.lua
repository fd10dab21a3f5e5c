-- Creates a run unless it is there. KEYS: run, runs index, events. ARGV: run id, creation time in seconds,
-- event JSON, notices channel, then field and value pairs of the record. Answers 1 when it was made, else 0.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('RPUSH', KEYS[3], ARGV[3])
redis.call('PUBLISH', ARGV[4], 'created')
return 1
