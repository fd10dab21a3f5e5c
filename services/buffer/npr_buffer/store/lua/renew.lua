-- ARGV: worker, lease in ms, group ids. Returns {number expired, {ids that are not the worker's any more}}.
local now = now_ms()
local expired = sweep_leases(now)
local lost = {}
for i = 3, #ARGV do
  if redis.call('HGET', run .. 'group:' .. ARGV[i], 'owner') == ARGV[1] then
    redis.call('ZADD', run .. 'leases', 'XX', now + tonumber(ARGV[2]), ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
publish_changes()
return {expired, lost}
