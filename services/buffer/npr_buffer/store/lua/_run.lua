-- Prelude of every script that touches a run. KEYS[1] is the run's prefix, `npr:run:{<run id>}:`; every key that a
-- script touches starts with it, so that a run lives in one hash slot.
--
--   meta                hash   sequence (enqueue counter), open (groups neither CONSUMED nor DISCARDED)
--   order               zset   group id by sequence; order:<channel> the same for one channel
--   group:<id>          hash   group (bytes), state, and the fields that scripts need
--   queue:<policy>      zset   waiting groups that need this policy: score -priority, member <sequence>:<id>
--   policies            set    policies that have a queue
--   waiting             zset   every waiting group by the time it was enqueued
--   leases              zset   every leased group by the time its lease ends
--   trajectories:<id>   hash   sample index -> ScoredTrajectory bytes
--   samples:<id>        hash   sample index -> SampleSummary bytes
--   counts:<channel>    hash   groups by state, trajectories, expected
--   answers             hash   enqueue request id -> its answer
--   lease_request:<id>  list   what a lease request took; expires some time after the leases
--
-- A script checks everything before its first write: a refusal (or a full memory) leaves nothing half done.
local run = KEYS[1]

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function load(id)
  local f = redis.call('HMGET', run .. 'group:' .. id,
    'state', 'channel', 'policy', 'priority', 'sequence', 'enqueued_ms', 'sample_count', 'owner', 'consumer', 'digest')
  if not f[1] then
    return nil
  end
  return {
    id = id, state = f[1], channel = f[2], policy = f[3], priority = tonumber(f[4]), sequence = f[5],
    enqueued_ms = f[6], sample_count = tonumber(f[7]), owner = f[8], consumer = f[9], digest = f[10],
  }
end

-- A group keeps its place for life: one that comes back waits before every younger one of its priority.
local function place(group)
  return string.format('%016d:%s', tonumber(group.sequence), group.id)
end

local function count(channel, field, by)
  redis.call('HINCRBY', run .. 'counts:' .. channel, field, by)
end

local touched = {}

local function enter(group, state)
  if state == 'WAITING' then
    redis.call('ZADD', run .. 'queue:' .. group.policy, -group.priority, place(group))
    redis.call('SADD', run .. 'policies', group.policy)
    redis.call('ZADD', run .. 'waiting', group.enqueued_ms, group.id)
  elseif state == 'CONSUMED' or state == 'DISCARDED' then
    redis.call('HINCRBY', run .. 'meta', 'open', -1)
  end
  redis.call('HSET', run .. 'group:' .. group.id, 'state', state)
  count(group.channel, state, 1)
  touched[group.channel] = true
end

local function leave(group)
  if group.state == 'WAITING' then
    redis.call('ZREM', run .. 'queue:' .. group.policy, place(group))
    redis.call('ZREM', run .. 'waiting', group.id)
  elseif group.state == 'LEASED' then
    redis.call('ZREM', run .. 'leases', group.id)
    redis.call('HDEL', run .. 'group:' .. group.id, 'owner', 'lease_request')
  end
  count(group.channel, group.state, -1)
end

-- The only way from state to state.
local function move(group, state)
  leave(group)
  enter(group, state)
  group.state = state
end

-- Tells those who watch which channels changed; last statement before a return.
local function publish_changes()
  for channel in pairs(touched) do
    redis.call('PUBLISH', run .. 'changed', channel)
  end
end

-- Puts groups whose lease has ended back in the queue, at most 1,000 a call. Returns how many.
local function sweep_leases(now)
  local ended = redis.call('ZRANGEBYSCORE', run .. 'leases', '-inf', now, 'LIMIT', 0, 1000)
  for _, id in ipairs(ended) do
    move(load(id), 'WAITING')
  end
  if #ended > 0 then
    redis.call('PUBLISH', 'npr:work', run)
  end
  return #ended
end

-- The ids that this lease request took and that are still its own.
local function held_by_request(request)
  local held = {}
  for _, id in ipairs(redis.call('LRANGE', run .. 'lease_request:' .. request, 0, -1)) do
    if redis.call('HGET', run .. 'group:' .. id, 'lease_request') == request then
      held[#held + 1] = id
    end
  end
  return held
end

-- The queue whose head comes first: highest priority, then the preferred policy, then the oldest.
-- `prefer` and `need` are policy keys; '*' prefers nothing and needs nothing. `only` = '1' leaves out every queue but
-- the preferred one and the one that needs no policy; those in `avoid`, a JSON list of keys, are left out anyway.
-- Returns nil, or {policy, score, stranger, sequence, head}.
local function best_queue(prefer, only, need, avoid)
  local best, avoided = nil, {}
  for _, policy in ipairs(cjson.decode(avoid)) do
    avoided[policy] = true
  end
  for _, policy in ipairs(redis.call('SMEMBERS', run .. 'policies')) do
    local head = redis.call('ZRANGE', run .. 'queue:' .. policy, 0, 0, 'WITHSCORES')
    if #head == 0 then
      redis.call('SREM', run .. 'policies', policy)
    elseif not avoided[policy] and (need == '*' or policy == need) and (only ~= '1' or policy == prefer or policy == '') then
      local stranger = (prefer ~= '*' and policy ~= prefer) and 1 or 0
      local found = {policy, tonumber(head[2]), stranger, tonumber(string.sub(head[1], 1, 16)), string.sub(head[1], 18)}
      if best == nil or found[2] < best[2]
        or (found[2] == best[2] and (found[3] < best[3] or (found[3] == best[3] and found[4] < best[4]))) then
        best = found
      end
    end
  end
  return best
end

-- {now, expired, waiting, leased, enqueued_ms of the oldest waiting group, end of the next lease}; the last two are nil
-- where there is none.
local function depth(now, expired)
  local oldest = redis.call('ZRANGE', run .. 'waiting', 0, 0, 'WITHSCORES')
  local next_end = redis.call('ZRANGE', run .. 'leases', 0, 0, 'WITHSCORES')
  return {
    now, expired, redis.call('ZCARD', run .. 'waiting'), redis.call('ZCARD', run .. 'leases'),
    oldest[2] or false, next_end[2] or false,
  }
end
