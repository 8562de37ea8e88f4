-- Charges a tenant for the tokens of a job that has ended.
--
-- KEYS  1 token budget    ARGV  1 ms that these tokens take at the tenant's rate
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local value = redis.pcall('GET', KEYS[1])
local at = math.max(type(value) == 'string' and tonumber(value) or 0, now) + tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.3f', at), 'PX', math.ceil(at - now) + 1000)
return 1
