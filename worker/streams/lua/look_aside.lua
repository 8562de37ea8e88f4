-- Looks at what was put back in a lane and waits for whoever takes it next: into a lot, or handed over.
--
-- KEYS  1 lane    ARGV  1 group  2 the consumer that it waits under  3 entry id after which to look  4 most entries
-- Answers {{id, its fields as far as its limits depend on them}, ...}, in order
local WANTED = {id = true, tenant = true, idempotency_key = true, ttl_ms = true, deadline_ms = true}
local MAX_VALUE = 1024
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '(' .. ARGV[3], '+', ARGV[4], ARGV[2])
if pending.err then return {} end
local entries = {}
for _, waiting in ipairs(pending) do
  local entry = redis.call('XRANGE', KEYS[1], waiting[1], waiting[1])[1]
  local fields = {}
  for i = 1, entry and #entry[2] or 0, 2 do
    if WANTED[entry[2][i]] then
      fields[#fields + 1] = entry[2][i]
      fields[#fields + 1] = string.sub(entry[2][i + 1], 1, MAX_VALUE)
    end
  end
  entries[#entries + 1] = {waiting[1], fields}
end
return entries
