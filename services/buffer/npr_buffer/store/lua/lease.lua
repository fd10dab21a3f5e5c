-- ARGV: lease request id, worker, most groups, lease in ms, prefer, only, need, avoid.
-- Returns {depth, policy or nil, {bytes, end of the lease in ms, {indices that are there}}...}.
local request, worker, most, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
local expired = sweep_leases(now)
local ids = held_by_request(request)
local policy = false

if #ids == 0 then
  local best = best_queue(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
  if best then
    for _, member in ipairs(redis.call('ZRANGE', run .. 'queue:' .. best[1], 0, most - 1)) do
      ids[#ids + 1] = string.sub(member, 18)
    end
  end
  redis.call('DEL', run .. 'lease_request:' .. request)
  for _, id in ipairs(ids) do
    move(load(id), 'LEASED')
    redis.call('ZADD', run .. 'leases', now + lease_ms, id)
    redis.call('HSET', run .. 'group:' .. id, 'owner', worker, 'lease_request', request)
    redis.call('RPUSH', run .. 'lease_request:' .. request, id)
  end
  if #ids > 0 then
    redis.call('PEXPIRE', run .. 'lease_request:' .. request, math.max(lease_ms, 600000))
  end
end

local leased = {}
for i, id in ipairs(ids) do
  local fields = redis.call('HMGET', run .. 'group:' .. id, 'group', 'policy')
  policy = fields[2]
  leased[i] = {
    fields[1], tonumber(redis.call('ZSCORE', run .. 'leases', id)), redis.call('HKEYS', run .. 'samples:' .. id),
  }
end
publish_changes()
return {depth(now, expired), policy, leased}
