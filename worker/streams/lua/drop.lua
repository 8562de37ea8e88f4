-- Drops a duplicate or a conflict: state, reply and prompt belong to the first entry, so nothing else is touched.
--
-- KEYS  1 lane    ARGV  1 group  2 consumer  3 entry id
-- Answers 1, or 0 where the entry is not this consumer's
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if pending.err then
  local is_gone = string.find(pending.err, 'NOGROUP', 1, true) or string.find(pending.err, 'WRONGTYPE', 1, true)
  if is_gone then return 0 end
  return pending
end
if #pending == 0 then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return 1
