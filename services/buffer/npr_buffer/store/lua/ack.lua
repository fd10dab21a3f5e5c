-- ARGV: consumer, policy version, group ids.
-- Returns {'OK'}, or {'NO_GROUP' | 'NOT_READY' | 'VERSION', {what is wrong, one a group}}.
local consumer, version = ARGV[1], ARGV[2]
local refused = {NO_GROUP = {}, NOT_READY = {}, VERSION = {}}
local ready = {}
for i = 3, #ARGV do
  local group = load(ARGV[i])
  if not group then
    table.insert(refused.NO_GROUP, ARGV[i])
  elseif group.state == 'CONSUMED' and group.consumer ~= consumer then
    table.insert(refused.NOT_READY, group.id .. ' (CONSUMED by ' .. group.consumer .. ')')
  elseif group.state ~= 'READY' and group.state ~= 'CONSUMED' then
    table.insert(refused.NOT_READY, group.id .. ' (' .. group.state .. ')')
  else
    local has = redis.call('HGET', run .. 'group:' .. group.id, 'version')
    if has ~= version then
      table.insert(refused.VERSION, group.id .. ' (' .. has .. ')')
    elseif group.state == 'READY' then
      ready[group.id] = group
    end
  end
end
for _, reason in ipairs({'NO_GROUP', 'NOT_READY', 'VERSION'}) do
  if #refused[reason] > 0 then
    return {reason, refused[reason]}
  end
end
for id, group in pairs(ready) do
  move(group, 'CONSUMED')
  redis.call('HSET', run .. 'group:' .. id, 'consumer', consumer)
end
publish_changes()
return {'OK'}
