-- One beat of a worker's heart.
--
-- KEYS  1 workers  2 worker hash    ARGV  1 worker id  2 expiry ms  3.. fields
-- Answers the server's time in ms
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('ZADD', KEYS[1], now, ARGV[1])
local fields = {'HSET', KEYS[2], 'beat', now}
for i = 3, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call(unpack(fields))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return now
