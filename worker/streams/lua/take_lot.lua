-- Takes the oldest entries of a tenant's lot.
--
-- KEYS  1 lane    ARGV  1 group  2 consumer  3 the lot  4 most entries
-- Answers {{id, fields, deliveries since it was put there}, ...}
local entries = {}
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[3])
if pending.err then return {} end
for _, waiting in ipairs(pending) do
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, waiting[1])
  if claimed[1] then
    entries[#entries + 1] = {waiting[1], claimed[1][2], waiting[4] + 1}
  else  -- the entry was deleted
    redis.call('XACK', KEYS[1], ARGV[1], waiting[1])
  end
end
-- An empty lot goes: there may be very many tenants. Check and deletion are one step, and nothing is destroyed.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[3])
end
return entries
