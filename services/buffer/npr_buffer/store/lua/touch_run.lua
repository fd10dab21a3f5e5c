-- Puts a run in the index of runs with open work under a generation that no entry had before, and wakes those who wait
-- for work. KEYS: index, generation counter. ARGV: run id.
redis.call('ZADD', KEYS[1], redis.call('INCR', KEYS[2]), ARGV[1])
redis.call('PUBLISH', 'npr:work', ARGV[1])
return redis.status_reply('OK')
