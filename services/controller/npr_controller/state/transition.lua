-- One durable transition of a run: all of it, or nothing.
-- KEYS: leader, run, facts, events.
-- ARGV: fence ('' for a transition that anybody may make), expected states (comma-separated), event JSON,
--       notices channel, event channel, number n of record fields, n x (field, value),
--       number f of facts, f x (name, JSON; '' forgets the fact).
-- Answers the event's sequence number, or an error: NOT_LEADER, NO_RUN, or STATE <the state there is>.
local fence, expected = ARGV[1], ARGV[2]
if fence ~= '' and redis.call('GET', KEYS[1]) ~= fence then
  return redis.error_reply('NOT_LEADER')
end
local state = redis.call('HGET', KEYS[2], 'state')
if not state then
  return redis.error_reply('NO_RUN')
end
if not string.find(',' .. expected .. ',', ',' .. state .. ',', 1, true) then
  return redis.error_reply('STATE ' .. state)
end
local cursor = 6
local function pairs_of(count, apply)
  for _ = 1, count do
    apply(ARGV[cursor + 1], ARGV[cursor + 2])
    cursor = cursor + 2
  end
end
local fields = tonumber(ARGV[cursor])
pairs_of(fields, function(field, value) redis.call('HSET', KEYS[2], field, value) end)
cursor = cursor + 1
pairs_of(tonumber(ARGV[cursor]), function(name, value)
  if value == '' then redis.call('HDEL', KEYS[3], name) else redis.call('HSET', KEYS[3], name, value) end
end)
local sequence = redis.call('RPUSH', KEYS[4], ARGV[3])
redis.call('PUBLISH', ARGV[5], sequence)
if ARGV[4] ~= '' then redis.call('PUBLISH', ARGV[4], 'changed') end
return sequence
