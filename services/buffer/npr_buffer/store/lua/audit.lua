-- Recounts the run from its groups and compares; one script, so nothing moves meanwhile. Changes nothing.
-- Returns {problems, {state, number, ...}, {consumer, number, ...}, trajectories, expected}.
local problems = {}

local function problem(...)
  problems[#problems + 1] = string.format(...)
end

local function bump(counts, name, by)
  counts[name] = (counts[name] or 0) + by
end

local function flat(counts)
  local list = {}
  for name, number in pairs(counts) do
    list[#list + 1] = name
    list[#list + 1] = number
  end
  return list
end

local KNOWN = {WAITING = true, LEASED = true, READY = true, CONSUMED = true, DISCARDED = true}

-- A group is in the structures of its state and in no other.
local function check_places(group)
  local queued = redis.call('ZSCORE', run .. 'queue:' .. group.policy, place(group)) and true or false
  local waiting = redis.call('ZSCORE', run .. 'waiting', group.id) and true or false
  local leased = redis.call('ZSCORE', run .. 'leases', group.id) and true or false
  if queued ~= (group.state == 'WAITING') or waiting ~= queued then
    problem('group %s is %s; in queue: %s, waiting: %s', group.id, group.state, tostring(queued), tostring(waiting))
  end
  if leased ~= (group.state == 'LEASED') or leased ~= (group.owner and true or false) then
    problem('group %s is %s; has lease: %s, owner: %s', group.id, group.state, tostring(leased), tostring(group.owner))
  end
  if (group.state == 'CONSUMED') ~= (group.consumer and true or false) then
    problem('group %s is %s; consumer: %s', group.id, group.state, tostring(group.consumer))
  end
end

-- As many trajectories as summaries, under indices that exist, all of them where the group is complete.
local function check_samples(group)
  local indices = redis.call('HKEYS', run .. 'trajectories:' .. group.id)
  for _, index in ipairs(indices) do
    if tonumber(index) >= group.sample_count then
      problem('group %s has a sample %s of %d', group.id, index, group.sample_count)
    end
    if redis.call('HEXISTS', run .. 'samples:' .. group.id, index) == 0 then
      problem('sample %s of group %s has no summary', index, group.id)
    end
  end
  if #indices ~= redis.call('HLEN', run .. 'samples:' .. group.id) then
    problem('group %s has summaries without trajectories', group.id)
  end
  local complete = #indices == group.sample_count
  if group.state ~= 'DISCARDED' and complete ~= (group.state == 'READY' or group.state == 'CONSUMED') then
    problem('group %s is %s with %d of %d samples', group.id, group.state, #indices, group.sample_count)
  end
  return #indices
end

local states, consumers, by_channel = {}, {}, {}
local trajectories, expected, open = 0, 0, 0
local ids = redis.call('ZRANGE', run .. 'order', 0, -1)
for _, id in ipairs(ids) do
  local group = load(id)
  if not group then
    problem('group %s is listed and not there', id)
  elseif not KNOWN[group.state] then
    problem('group %s is in no known state: %s', id, group.state)
  else
    check_places(group)
    local here = check_samples(group)
    local counts = by_channel[group.channel] or {}
    by_channel[group.channel] = counts
    bump(counts, group.state, 1)
    bump(counts, 'trajectories', here)
    bump(counts, 'expected', group.sample_count)
    bump(states, group.state, 1)
    if group.consumer then
      bump(consumers, group.consumer, 1)
    end
    if group.state ~= 'CONSUMED' and group.state ~= 'DISCARDED' then
      open = open + 1
    end
    trajectories = trajectories + here
    expected = expected + group.sample_count
  end
end

for channel, counts in pairs(by_channel) do
  for _, field in ipairs({'WAITING', 'LEASED', 'READY', 'CONSUMED', 'DISCARDED', 'trajectories', 'expected'}) do
    local kept = tonumber(redis.call('HGET', run .. 'counts:' .. channel, field) or '0')
    if kept ~= (counts[field] or 0) then
      problem('channel %s counts %d %s; there are %d', channel, kept, field, counts[field] or 0)
    end
  end
end

local function check_total(what, kept, real)
  if kept ~= real then
    problem('%s: %d kept, %d counted', what, kept, real)
  end
end

check_total('waiting groups', redis.call('ZCARD', run .. 'waiting'), states.WAITING or 0)
check_total('leases', redis.call('ZCARD', run .. 'leases'), states.LEASED or 0)
check_total('open groups', tonumber(redis.call('HGET', run .. 'meta', 'open') or '0'), open)
local queued = 0
for _, policy in ipairs(redis.call('SMEMBERS', run .. 'policies')) do
  queued = queued + redis.call('ZCARD', run .. 'queue:' .. policy)
end
check_total('queued groups', queued, states.WAITING or 0)
return {problems, flat(states), flat(consumers), trajectories, expected}
