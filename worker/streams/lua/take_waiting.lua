-- Takes one entry that waits, wherever: put back under another name, or not read yet. A group read reaches only the
-- head of a lane, so those that lie before an unread one are read too, and put into the lots of their tenants. So is
-- the next one after the last that anybody has read: where that one is deleted while earlier ones run, the group's lag
-- is null, until somebody reads on.
--
-- KEYS  1 lane
-- ARGV  1 group  2 consumer  3 entry id  4 the consumer that handed-over entries wait under
--       5 most entries to put into lots in one call  6 '1': the entry itself goes into its lot as well
-- Answers nil where a peer has it, or it is gone; 'more' where it lies further back: call again;
--         {its fields, how often it was delivered since it was last opened or put back}
local lane, group, consumer, id, handover = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local function put_into_lot(entry)
  local tenant = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'tenant' then tenant = entry[2][i + 1] end
  end
  local lot = 'tenant.' .. string.sub(redis.sha1hex(tenant), 1, 16)
  redis.call('XCLAIM', lane, group, lot, 0, entry[1], 'RETRYCOUNT', 0, 'JUSTID')
end

local function read(count)
  local answer = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', lane, '>')
  return answer and answer[1][2] or {}
end

local function has_earlier()
  return #redis.call('XRANGE', lane, '-', '(' .. id, 'COUNT', 1) > 0
end

local pending = redis.pcall('XPENDING', lane, group, id, id, 1)
if pending.err then return false end
local delivered
for _, info in ipairs(redis.call('XINFO', 'GROUPS', lane)) do
  local values = {}
  for i = 1, #info, 2 do values[info[i]] = info[i + 1] end
  if values['name'] == group then delivered = values['last-delivered-id'] end
end
if #pending > 0 then
  local owner = pending[1][2]
  local is_aside = string.match(owner, '^tenant%.%x+$') ~= nil
  if ARGV[6] == '1' or not (is_aside or owner == handover) then return false end
  local claimed = redis.call('XCLAIM', lane, group, consumer, 0, id)
  if not claimed[1] then  -- the entry was deleted
    redis.call('XACK', lane, group, id)
    return false
  end
  if is_aside and #redis.call('XPENDING', lane, group, '-', '+', 1, owner) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', lane, group, owner)
  end
  if delivered == id and has_earlier() then
    for _, entry in ipairs(read(1)) do put_into_lot(entry) end
  end
  return {claimed[1][2], pending[1][4] + 1}
end

if #redis.call('XRANGE', lane, id, id, 'COUNT', 1) == 0 then return false end
local ahead = redis.call('XRANGE', lane, '(' .. delivered, id, 'COUNT', ARGV[5])
if #ahead == 0 then return false end
local is_reached = ahead[#ahead][1] == id
local is_taken = is_reached and ARGV[6] ~= '1'
local fields
for _, entry in ipairs(read(is_taken and has_earlier() and #ahead + 1 or #ahead)) do
  if is_taken and entry[1] == id then fields = entry[2] else put_into_lot(entry) end
end
if not is_reached then return 'more' end
return {fields or {}, 1}
