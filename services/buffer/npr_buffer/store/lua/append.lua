-- ARGV, 7 a trajectory: group id, sample index, policy, digest, policy version, bytes, summary.
-- Returns {'OK', appended, duplicates, {groups that became READY}}, or {'NO_GROUP' | 'INDEX' | 'POLICY', {group ids}}.
-- A sample of a DISCARDED group is kept, for it was paid for; the group stays discarded.
local groups = {}
local refused = {NO_GROUP = {}, INDEX = {}, POLICY = {}}

local function refuse(reason, id)
  table.insert(refused[reason], id)
end

for i = 1, #ARGV, 7 do
  local id = ARGV[i]
  groups[id] = groups[id] or load(id)
  local group = groups[id]
  if not group then
    refuse('NO_GROUP', id)
  elseif tonumber(ARGV[i + 1]) >= group.sample_count then
    refuse('INDEX', id)
  elseif group.policy ~= '' and (group.policy ~= ARGV[i + 2] or (group.digest ~= '' and group.digest ~= ARGV[i + 3])) then
    refuse('POLICY', id)
  end
end
for _, reason in ipairs({'NO_GROUP', 'INDEX', 'POLICY'}) do
  if #refused[reason] > 0 then
    return {reason, refused[reason]}
  end
end

-- The one policy version of a group's trajectories, or 'mixed': AckGroups asks for it.
local function note_version(id, version)
  local key = run .. 'group:' .. id
  local known = redis.call('HGET', key, 'version')
  if known ~= version then
    redis.call('HSET', key, 'version', known and 'mixed' or version)
  end
end

local appended, duplicates, ready = 0, 0, {}
for i = 1, #ARGV, 7 do
  local id, index = ARGV[i], ARGV[i + 1]
  local group = groups[id]
  if redis.call('HSETNX', run .. 'trajectories:' .. id, index, ARGV[i + 5]) == 0 then
    duplicates = duplicates + 1
  else
    appended = appended + 1
    redis.call('HSET', run .. 'samples:' .. id, index, ARGV[i + 6])
    note_version(id, ARGV[i + 4])
    count(group.channel, 'trajectories', 1)
    touched[group.channel] = true
    if (group.state == 'WAITING' or group.state == 'LEASED')
      and redis.call('HLEN', run .. 'trajectories:' .. id) == group.sample_count then
      move(group, 'READY')
      ready[#ready + 1] = id
    end
  end
end
publish_changes()
return {'OK', appended, duplicates, ready}
