-- Renews the leases of the entries held in one lane.
--
-- KEYS  1 lane    ARGV  1 group  2 consumer  3.. entry ids
-- Answers {ids that are another's or settled, ids that were deleted from the stream}
local group, consumer = ARGV[1], ARGV[2]
local pending = redis.pcall('XPENDING', KEYS[1], group, '-', '+', 1000000, consumer)
if pending.err then
  if not string.find(pending.err, 'NOGROUP', 1, true) then return pending end
  pending = {}
end
local is_mine = {}
for _, entry in ipairs(pending) do is_mine[entry[1]] = true end

local lost, held = {}, {}
for i = 3, #ARGV do
  if is_mine[ARGV[i]] then held[#held + 1] = ARGV[i] else lost[#lost + 1] = ARGV[i] end
end
if #held == 0 then return {lost, {}} end

local claim = {'XCLAIM', KEYS[1], group, consumer, 0}
for _, id in ipairs(held) do claim[#claim + 1] = id end
claim[#claim + 1] = 'JUSTID'
local claimed = redis.call(unpack(claim))
local is_claimed, deleted = {}, {}
for _, id in ipairs(claimed) do is_claimed[id] = true end
for _, id in ipairs(held) do
  if not is_claimed[id] then deleted[#deleted + 1] = id end
end
return {lost, deleted}
