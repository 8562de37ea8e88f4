-- Gives an entry back for a peer to take, without a mark against it.
--
-- KEYS  1 lane  2 state  3 control
-- ARGV  1 group  2 consumer  3 entry id  4 lane  5 the consumer it waits under  6 idle ms that it shall have
--       7 '1': wake the peers
-- Answers 1, or 0 where the entry is not this consumer's
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if pending.err then
  if string.find(pending.err, 'NOGROUP', 1, true) then return 0 end
  return pending
end
if #pending == 0 then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[6], 'RETRYCOUNT', 0, 'JUSTID')
-- HSET on a missing record would leave a hash without expiry.
if redis.call('HGET', KEYS[2], 'entry') == ARGV[4] .. '/' .. ARGV[3] then
  redis.call('HSET', KEYS[2], 'status', 'queued')
end
if ARGV[7] == '1' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'op', 'reclaim')
end
return 1
