-- ARGV: request id, group limit, then 8 a group: id, channel, policy, digest, sample count, priority, prompt id, bytes.
-- Returns {'OK', added, duplicates} or {'LIMIT', open}.
local answered = redis.call('HGET', run .. 'answers', ARGV[1])
if answered then
  local added, duplicates = string.match(answered, '(%d+) (%d+)')
  return {'OK', tonumber(added), tonumber(duplicates)}
end

local fresh, seen, duplicates = {}, {}, 0
for i = 3, #ARGV, 8 do
  local id = ARGV[i]
  if seen[id] or redis.call('EXISTS', run .. 'group:' .. id) == 1 then
    duplicates = duplicates + 1
  else
    seen[id] = true
    fresh[#fresh + 1] = i
  end
end

local open = tonumber(redis.call('HGET', run .. 'meta', 'open') or '0')
if #fresh > 0 and open + #fresh > tonumber(ARGV[2]) then
  return {'LIMIT', open}
end

local now = now_ms()
for _, i in ipairs(fresh) do
  local sequence = redis.call('HINCRBY', run .. 'meta', 'sequence', 1)
  local group = {
    id = ARGV[i], channel = ARGV[i + 1], policy = ARGV[i + 2], sequence = sequence,
    priority = tonumber(ARGV[i + 5]), enqueued_ms = now,
  }
  redis.call('HSET', run .. 'group:' .. group.id, 'channel', group.channel, 'policy', group.policy,
    'digest', ARGV[i + 3], 'sample_count', ARGV[i + 4], 'priority', ARGV[i + 5], 'prompt_id', ARGV[i + 6],
    'group', ARGV[i + 7], 'sequence', sequence, 'enqueued_ms', now)
  redis.call('ZADD', run .. 'order', sequence, group.id)
  redis.call('ZADD', run .. 'order:' .. group.channel, sequence, group.id)
  redis.call('HINCRBY', run .. 'meta', 'open', 1)
  count(group.channel, 'expected', ARGV[i + 4])
  enter(group, 'WAITING')
end
redis.call('HSET', run .. 'answers', ARGV[1], #fresh .. ' ' .. duplicates)
publish_changes()
return {'OK', #fresh, duplicates}
