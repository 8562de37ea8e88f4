-- Looks at the oldest undelivered entry of a lane.
--
-- KEYS  1 lane    ARGV  1 group  2 an entry id whose fields the caller has already
-- Answers {length of the stream, entry id or nil, its fields or nil}; a key of another type has no entries
local length = redis.pcall('XLEN', KEYS[1])
if type(length) == 'table' then
  if string.find(length.err, 'WRONGTYPE', 1, true) then return {0} end
  return length
end
if length == 0 then return {0} end
local groups = redis.call('XINFO', 'GROUPS', KEYS[1])
for _, info in ipairs(groups) do
  local name, delivered
  for i = 1, #info, 2 do
    if info[i] == 'name' then name = info[i + 1] end
    if info[i] == 'last-delivered-id' then delivered = info[i + 1] end
  end
  if name == ARGV[1] then
    local entry = redis.call('XRANGE', KEYS[1], '(' .. delivered, '+', 'COUNT', 1)[1]
    if not entry then return {length} end
    if entry[1] == ARGV[2] then return {length, entry[1]} end
    return {length, entry[1], entry[2]}
  end
end
return {length}
