-- Sweeps, and says what a lease would find. ARGV: lease request id, prefer, only, need, avoid.
-- Returns {depth, 1 if the request still holds groups, head}; head is {score, stranger, enqueued_ms} or nil.
local now = now_ms()
local expired = sweep_leases(now)
local head = false
local best = best_queue(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
if best then
  head = {best[2], best[3], tonumber(redis.call('HGET', run .. 'group:' .. best[5], 'enqueued_ms'))}
end
local holds = (ARGV[1] ~= '' and #held_by_request(ARGV[1]) > 0) and 1 or 0
publish_changes()
return {depth(now, expired), holds, head}
