-- Gives an entry back for a peer to take, without a mark against it.
--
-- KEYS  1 lane  2 state  3 control
-- ARGV  1 group  2 consumer  3 entry id  4 lane  5 the consumer it waits under  6 idle ms that it shall have
--       7 '1': wake the peers
-- Answers 'done', 'other' (another consumer has it) or 'gone' (nobody has it, so no peer can take it)
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if pending.err then
  local is_gone = string.find(pending.err, 'NOGROUP', 1, true) or string.find(pending.err, 'WRONGTYPE', 1, true)
  if is_gone then return 'gone' end
  return pending
end
if #pending == 0 then return 'gone' end
if pending[1][2] ~= ARGV[2] then return 'other' end
if #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3], 'COUNT', 1) == 0 then return 'gone' end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[6], 'RETRYCOUNT', 0, 'JUSTID')
-- What follows only helps, so keys of another type under these names are no hindrance.
-- HSET on a missing record would leave a hash without expiry; and what a dead worker had stays running in the record,
-- until somebody opens it and counts that.
local record = redis.pcall('HMGET', KEYS[2], 'entry', 'worker')
if record[1] == ARGV[4] .. '/' .. ARGV[3] and record[2] == ARGV[2] then
  redis.call('HSET', KEYS[2], 'status', 'queued')
end
if ARGV[7] == '1' then
  redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'op', 'reclaim')
end
return 'done'
