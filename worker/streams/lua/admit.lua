-- Asks whether a job may begin within its tenant's limits, and counts it if so.
--
-- Who runs is not counted up and down, which leaks when a worker dies, but looked up: an entry counts while a worker
-- has it under lease, and only where the limit seems to be reached is that asked.
--
-- KEYS  1 the tenant's running entries (a sorted set)  2 job budget  3 token budget  4 state  5-7 all lanes
-- ARGV  1 group  2 LANE/ENTRYID  3 lease ms  4 concurrency, 0: no limit
--       5 ms between two jobs, 0: no limit  6 ms that jobs may be ahead of that
--       7 '1': tokens are limited  8 ms that tokens may be ahead  9 ms that the running entries are kept
--       10 the consumer that handed-over entries wait under
-- Answers {'admitted'}, or {'concurrency', 0}, {'rate', ms to wait} or {'tokens', ms to wait}
local member, lease, limit = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000

local function is_running(name)
  local lane, id = string.match(name, '^(%a+)/(%d+%-%d+)$')
  local key = ({high = KEYS[5], normal = KEYS[6], low = KEYS[7]})[lane]
  local pending = key and redis.pcall('XPENDING', key, ARGV[1], id, id, 1) or {}
  if pending.err or #pending == 0 then return false end
  local owner = pending[1][2]
  return owner ~= ARGV[10] and not string.match(owner, '^tenant%.%x+$') and pending[1][3] < lease
end

local function budget(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and tonumber(value) or 0
end

-- What was begun goes on, and a known id is dropped once it is opened: neither is a new job.
local record = redis.pcall('HGET', KEYS[4], 'entry')
local is_begun = type(record) == 'string'
if limit > 0 then
  local members = redis.pcall('ZRANGE', KEYS[1], 0, -1)
  if members.err then
    redis.call('DEL', KEYS[1])
    members = {}
  end
  if #members >= limit then
    local num_running = 0
    for _, name in ipairs(members) do
      if name == member then
        num_running = num_running  -- asks again after a lost answer, or was taken over
      elseif is_running(name) then
        num_running = num_running + 1
      else
        redis.call('ZREM', KEYS[1], name)
      end
    end
    if num_running >= limit and not is_begun then return {'concurrency', 0} end
  end
end
if not is_begun then
  if ARGV[7] == '1' then
    local ahead = budget(KEYS[3]) - now - tonumber(ARGV[8])
    if ahead > 0 then return {'tokens', math.ceil(ahead)} end
  end
  local interval = tonumber(ARGV[5])
  if interval > 0 then
    local at = math.max(budget(KEYS[2]), now)
    local ahead = at - now - tonumber(ARGV[6])
    if ahead > 0 then return {'rate', math.ceil(ahead)} end
    redis.call('SET', KEYS[2], string.format('%.3f', at + interval), 'PX', math.ceil(at + interval - now) + 1000)
  end
end
if limit > 0 then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), member)
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
end
return {'admitted'}
