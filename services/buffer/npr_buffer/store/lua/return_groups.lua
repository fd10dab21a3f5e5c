-- ARGV: worker, group ids. Returns {number expired, number returned}.
local expired = sweep_leases(now_ms())
local returned = 0
for i = 2, #ARGV do
  local group = load(ARGV[i])
  if group and group.owner == ARGV[1] then
    move(group, 'WAITING')
    returned = returned + 1
  end
end
publish_changes()
return {expired, returned}
