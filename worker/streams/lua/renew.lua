-- Renews the leases of the entries held in one lane.
--
-- KEYS  1 lane    ARGV  1 group  2 consumer  3.. entry ids
-- Answers {ids that another consumer has, ids that nobody has: the entry, the group or the whole lane is gone}
local group, consumer = ARGV[1], ARGV[2]
local lost, orphaned, held = {}, {}, {}
local pending = redis.pcall('XPENDING', KEYS[1], group, '-', '+', 1000000, consumer)
if pending.err then
  local is_gone = string.find(pending.err, 'NOGROUP', 1, true) or string.find(pending.err, 'WRONGTYPE', 1, true)
  if not is_gone then return pending end
  for i = 3, #ARGV do orphaned[#orphaned + 1] = ARGV[i] end
  return {lost, orphaned}
end
local is_mine = {}
for _, entry in ipairs(pending) do is_mine[entry[1]] = true end
for i = 3, #ARGV do
  local id = ARGV[i]
  if is_mine[id] then
    held[#held + 1] = id
  elseif #redis.call('XPENDING', KEYS[1], group, id, id, 1) > 0 then
    lost[#lost + 1] = id
  else
    orphaned[#orphaned + 1] = id
  end
end
if #held == 0 then return {lost, orphaned} end

local claim = {'XCLAIM', KEYS[1], group, consumer, 0}
for _, id in ipairs(held) do claim[#claim + 1] = id end
claim[#claim + 1] = 'JUSTID'
local claimed = redis.call(unpack(claim))
local is_claimed = {}
for _, id in ipairs(claimed) do is_claimed[id] = true end
for _, id in ipairs(held) do
  if not is_claimed[id] then orphaned[#orphaned + 1] = id end
end
return {lost, orphaned}
