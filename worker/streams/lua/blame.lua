-- Writes into a job's record what its owner knows of its crashes, and whether it runs alone now.
--
-- The numbers are the owner's whole knowledge, not what is to be added: writing them again changes nothing, and what a
-- server lost in a failover is there again.
--
-- KEYS  1 lane  2 state    ARGV  1 group  2 consumer  3 entry id  4 lane  5 crashes  6 solo  7 alone: '1' or '0'
-- Answers 'done', 'other' (the job is another consumer's, or ended: nothing was done) or 'unrecorded' (there is no
-- record, or its key holds something else)
local group, consumer, entry_id = ARGV[1], ARGV[2], ARGV[3]

local function is_wrong_type(answer)
  return answer.err and string.find(answer.err, 'WRONGTYPE', 1, true)
end

local pending = redis.pcall('XPENDING', KEYS[1], group, entry_id, entry_id, 1)
if pending.err then
  if not (is_wrong_type(pending) or string.find(pending.err, 'NOGROUP', 1, true)) then return pending end
  pending = {}
end
if #pending > 0 and pending[1][2] ~= consumer then return 'other' end

local record = redis.pcall('HMGET', KEYS[2], 'entry', 'worker', 'status')
if record.err then
  if is_wrong_type(record) then return 'unrecorded' end
  return record
end
if not record[1] then return 'unrecorded' end
local is_ours = record[1] == ARGV[4] .. '/' .. entry_id and record[2] == consumer and record[3] == 'running'
if not is_ours then return 'other' end

-- A full server still allows XCLAIM, and after a script's first write it allows the rest. JUSTID: it is no delivery.
if #pending > 0 then redis.call('XCLAIM', KEYS[1], group, consumer, 0, entry_id, 'JUSTID') end
redis.call('HSET', KEYS[2], 'crashes', ARGV[5], 'solo', ARGV[6], 'alone', ARGV[7])
return 'done'
