-- Takes the oldest undelivered entry of a lane, if it is still the one that was looked at.
--
-- KEYS  1 lane    ARGV  1 group  2 consumer  3 entry id
-- Answers the entry {id, fields}, or nil where a peer was faster
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return false end
for _, info in ipairs(groups) do
  local name, delivered
  for i = 1, #info, 2 do
    if info[i] == 'name' then name = info[i + 1] end
    if info[i] == 'last-delivered-id' then delivered = info[i + 1] end
  end
  if name == ARGV[1] then
    local head = redis.call('XRANGE', KEYS[1], '(' .. delivered, '+', 'COUNT', 1)[1]
    if not head or head[1] ~= ARGV[3] then return false end
    local answer = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
    return answer and answer[1][2][1] or false
  end
end
return false
