-- Settles a job whose reply has its terminal event (or whose client is gone).
--
-- KEYS  1 lane  2 cancel mark  3 state  4 reply  5 prompt (left out: there is none, or a dead letter names it)
-- ARGV  1 group  2 consumer  3 entry id  4 lane  5 outcome ('': keep the record's)  6 result_ttl ms  7.. more record fields
-- Answers 'done', 'unrecorded' (done, but the record's key holds something else), 'other' (another's: nothing was
-- done), 'unended' (the server lost the end of the reply: nothing was done) or 'gone' (settled before, or no longer
-- pending to anybody)
local group, consumer, entry_id, result_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[6]

local function is_wrong_type(answer)
  return answer.err and string.find(answer.err, 'WRONGTYPE', 1, true)
end

local pending = redis.pcall('XPENDING', KEYS[1], group, entry_id, entry_id, 1)
if pending.err then
  if not (is_wrong_type(pending) or string.find(pending.err, 'NOGROUP', 1, true)) then return pending end
  pending = {}
end
if #pending > 0 and pending[1][2] ~= consumer then return 'other' end

local record = redis.pcall('HMGET', KEYS[3], 'entry', 'worker', 'status')
local answer = 'done'
if record.err then
  if not is_wrong_type(record) then return record end
  record, answer = {}, 'unrecorded'
end
local is_ours = record[1] == ARGV[4] .. '/' .. entry_id

-- A server that was killed may come back without the last second of its writes, the terminal event among them. The entry
-- then stays for whoever takes it next, to end the reply once more. No reply at all: if it was opened, its client has
-- deleted it.
local last = redis.pcall('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
local is_ended = last and string.find(last[1], '-18446744073709551615', 1, true)
if not is_ended and (last or not is_ours) then return 'unended' end

if #pending == 0 then
  -- Not pending, but the record says that it runs here: the entry, its group or its lane was deleted under us.
  if not (is_ours and record[2] == consumer and record[3] == 'running') then
    redis.pcall('XDEL', KEYS[1], entry_id)  -- an entry that is settled must not be delivered by a new group
    return 'gone'
  end
  answer = 'gone'
end
-- A full server still allows XACK, and after a script's first write it allows the rest. Where the lane is a lane no
-- more there is nothing to take off it; where only its group is gone, the entry would be delivered once more.
redis.pcall('XACK', KEYS[1], group, entry_id)
redis.pcall('XDEL', KEYS[1], entry_id)
redis.call('DEL', KEYS[2])
if KEYS[5] then redis.call('DEL', KEYS[5]) end
redis.call('PEXPIRE', KEYS[4], result_ttl)
if is_ours then
  local fields = {'HSET', KEYS[3]}
  if ARGV[5] ~= '' then
    fields[#fields + 1] = 'status'
    fields[#fields + 1] = ARGV[5]
  end
  for i = 7, #ARGV do fields[#fields + 1] = ARGV[i] end
  if #fields > 2 then redis.call(unpack(fields)) end
  -- Last: a time that is over at once removes the record, and to write to it then would make one that never expires.
  redis.call('PEXPIRE', KEYS[3], result_ttl)
end
return answer
