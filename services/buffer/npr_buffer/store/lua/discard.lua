-- ARGV: reason, group ids. Returns {'OK'}, or {'NO_GROUP' | 'CONSUMED', {what is wrong, one a group}}.
-- The first reason stays.
local refused = {NO_GROUP = {}, CONSUMED = {}}
local discarded = {}
for i = 2, #ARGV do
  local group = load(ARGV[i])
  if not group then
    table.insert(refused.NO_GROUP, ARGV[i])
  elseif group.state == 'CONSUMED' then
    table.insert(refused.CONSUMED, group.id .. ' (CONSUMED by ' .. group.consumer .. ')')
  elseif group.state ~= 'DISCARDED' then
    discarded[group.id] = group
  end
end
for _, reason in ipairs({'NO_GROUP', 'CONSUMED'}) do
  if #refused[reason] > 0 then
    return {reason, refused[reason]}
  end
end
for id, group in pairs(discarded) do
  move(group, 'DISCARDED')
  redis.call('HSET', run .. 'group:' .. id, 'discard_reason', ARGV[1])
end
publish_changes()
return {'OK'}
