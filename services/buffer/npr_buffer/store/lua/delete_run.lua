-- Deletes every key of the run in one go; memory is freed in the background. Returns how many groups there were.
local function unlink_each(name, ids)
  for _, id in ipairs(ids) do
    redis.call('UNLINK', run .. name .. id)
  end
end

local ids = redis.call('ZRANGE', run .. 'order', 0, -1)
local channels = {}
for _, id in ipairs(ids) do
  local channel = redis.call('HGET', run .. 'group:' .. id, 'channel')
  if channel and not channels[channel] then
    channels[channel] = true
    unlink_each('', {'order:' .. channel, 'counts:' .. channel})
  end
end
for _, name in ipairs({'group:', 'trajectories:', 'samples:'}) do
  unlink_each(name, ids)
end
unlink_each('queue:', redis.call('SMEMBERS', run .. 'policies'))
unlink_each('', {'meta', 'order', 'policies', 'waiting', 'leases', 'answers'})
for channel in pairs(channels) do
  touched[channel] = true
end
publish_changes()
return #ids
