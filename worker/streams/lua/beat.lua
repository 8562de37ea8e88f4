-- One beat of a worker's heart. A key of another type under either name costs that part of the beat alone.
--
-- KEYS  1 workers  2 worker hash    ARGV  1 worker id  2 expiry ms  3.. fields
-- Answers the server's time in ms
local function call_unless_wrong_type(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err and not string.find(answer.err, 'WRONGTYPE', 1, true) then
    redis.call(...)  -- fails again, and ends the script with the server's own error
  end
end

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
call_unless_wrong_type('ZADD', KEYS[1], now, ARGV[1])
local fields = {'HSET', KEYS[2], 'beat', now}
for i = 3, #ARGV do fields[#fields + 1] = ARGV[i] end
call_unless_wrong_type(unpack(fields))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return now
