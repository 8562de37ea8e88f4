-- Deletes consumer names that nobody uses. Check and deletion are one step: deleting destroys what is pending.
--
-- KEYS  1 lane    ARGV  1 group  2 idle ms from which on a name counts as unused  3 the name that is never deleted
-- Answers the names deleted
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return {} end
local deleted = {}
for _, info in ipairs(consumers) do
  local name, pending, idle
  for i = 1, #info, 2 do
    if info[i] == 'name' then name = info[i + 1] end
    if info[i] == 'pending' then pending = info[i + 1] end
    if info[i] == 'idle' then idle = info[i + 1] end
  end
  if name ~= ARGV[3] and pending == 0 and idle >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], name)
    deleted[#deleted + 1] = name
  end
end
return deleted
