-- Extends or releases the leader's lease if it is still the caller's. KEYS: leader.
-- ARGV: token, milliseconds from now (0 releases), notices channel. Answers 1 when the lease was the caller's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[3], 'released')
else
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
