-- Looks at what waits in a lane: entries that nobody has read, and those that were put into the lots of their tenants.
--
-- KEYS  1 lane
-- ARGV  1 group  2 entry id after which the caller hasn't looked yet, '' to begin with the first that nobody has read
--       3 most entries to look at  4 idle ms from which on entries in a lot are touched, so that they don't look dead
-- Answers {}                                 there is no such lane or group
--         {length, last delivered id, lots, entries, 1 if there may be more}
--           a lot: {name, number of entries, id of the oldest}
--           an entry: {id, its lot, its fields as far as its limits depend on them}
local WANTED = {id = true, tenant = true, idempotency_key = true, ttl_ms = true, deadline_ms = true}
local MAX_VALUE = 1024
-- An entry has up to a megabyte, all of which is read here.
local CHUNK, MAX_BYTES = 8, 4 * 1024 * 1024
local MAX_TOUCHED = 500
local group = ARGV[1]

local length = redis.pcall('XLEN', KEYS[1])
if type(length) == 'table' then
  if string.find(length.err, 'WRONGTYPE', 1, true) then return {} end
  return length
end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return {} end
local delivered, num_pending
for _, info in ipairs(groups) do
  local values = {}
  for i = 1, #info, 2 do values[info[i]] = info[i + 1] end
  if values['name'] == group then delivered, num_pending = values['last-delivered-id'], values['pending'] end
end
if not delivered then return {} end

local lots = {}
if num_pending > 0 then
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], group)) do
    local values = {}
    for i = 1, #info, 2 do values[info[i]] = info[i + 1] end
    local name = values['name']
    if values['pending'] > 0 and string.match(name, '^tenant%.%x+$') then
      local oldest = redis.call('XPENDING', KEYS[1], group, '-', '+', 1, name)
      lots[#lots + 1] = {name, values['pending'], oldest[1][1]}
      local idle = redis.call('XPENDING', KEYS[1], group, 'IDLE', ARGV[4], '-', '+', MAX_TOUCHED, name)
      if #idle > 0 then
        local claim = {'XCLAIM', KEYS[1], group, name, 0}
        for _, entry in ipairs(idle) do claim[#claim + 1] = entry[1] end
        claim[#claim + 1] = 'JUSTID'
        redis.call(unpack(claim))
      end
    end
  end
end

local entries, num_bytes, has_more = {}, 0, 1
local start = ARGV[2] ~= '' and ARGV[2] or delivered
while has_more == 1 and #entries < tonumber(ARGV[3]) and num_bytes < MAX_BYTES do
  local chunk = redis.call('XRANGE', KEYS[1], '(' .. start, '+', 'COUNT', CHUNK)
  for _, entry in ipairs(chunk) do
    local fields, tenant = {}, ''
    for i = 1, #entry[2], 2 do
      local name, value = entry[2][i], entry[2][i + 1]
      num_bytes = num_bytes + #value
      if name == 'tenant' then tenant = value end
      if WANTED[name] then
        fields[#fields + 1] = name
        fields[#fields + 1] = string.sub(value, 1, MAX_VALUE)
      end
    end
    entries[#entries + 1] = {entry[1], 'tenant.' .. string.sub(redis.sha1hex(tenant), 1, 16), fields}
    start = entry[1]
  end
  if #chunk < CHUNK then has_more = 0 end
end
return {length, delivered, lots, entries, has_more}
