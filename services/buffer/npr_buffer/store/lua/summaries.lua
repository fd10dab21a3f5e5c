-- ARGV: '1' for samples too, group ids.
-- Returns one a group that exists: {id, prompt id, state, sample count, consumer, reason, {index, summary, ...}}.
local summaries = {}
for i = 2, #ARGV do
  local f = redis.call('HMGET', run .. 'group:' .. ARGV[i],
    'prompt_id', 'state', 'sample_count', 'consumer', 'discard_reason')
  if f[2] then
    local samples = ARGV[1] == '1' and redis.call('HGETALL', run .. 'samples:' .. ARGV[i]) or {}
    summaries[#summaries + 1] = {ARGV[i], f[1], f[2], tonumber(f[3]), f[4] or '', f[5] or '', samples}
  end
end
return summaries
