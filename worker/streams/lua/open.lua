-- Opens an attempt of a job: the reply's fence against every earlier attempt, and the job's record.
--
-- KEYS  1 the entry's lane  2 reply  3 state  4 cancel mark  5-7 all lanes: high, normal, low
-- ARGV  1 group  2 consumer  3 entry id  4 lane  5 digest  6 model  7 run_ttl ms
--       8 the caller's own attempt of this reply, 0 if it has none  9 tenant
--
-- Answers {'lost'}                                          the entry is another consumer's, or gone unopened
--         {'duplicate'} or {'conflict'}                     the id belongs to another entry: drop this one
--         {'ended', e, code, usage or nil}                  the reply has its terminal event: settle
--         {'blocked', key}                                  what is under that key leaves no way to answer
--         {'opened', attempt, from, crashes, solo, cancel reason or nil, 1 if this entry was opened before, 2 if it was
--          and its reply is gone}
local lane_key, reply_key, state_key, cancel_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, entry_id, lane, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local model, run_ttl, own_attempt, tenant = ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
local TERMINAL = '18446744073709551615'
-- Beyond it Lua can't count up. No worker gets there, so somebody typed such an attempt.
local LARGEST = 2 ^ 53

local function is_wrong_type(answer)
  return answer.err and string.find(answer.err, 'WRONGTYPE', 1, true)
end

local pending = redis.pcall('XPENDING', lane_key, group, entry_id, entry_id, 1)
if pending.err then
  if not (is_wrong_type(pending) or string.find(pending.err, 'NOGROUP', 1, true)) then return pending end
  pending = {}
end
if #pending > 0 and pending[1][2] ~= consumer then return {'lost'} end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return nil
end

local last_attempt, last_seq, last_fields = 0, '', {}
local newest = redis.pcall('XREVRANGE', reply_key, '+', '-', 'COUNT', 1)
if is_wrong_type(newest) then return {'blocked', reply_key} end
if newest.err then return newest end
local last = newest[1]
if last then
  local ms, seq = string.match(last[1], '^(%d+)-(%d+)$')
  last_attempt, last_seq, last_fields = tonumber(ms), seq, last[2]
end

-- 1. A record of another entry: the id is taken, or the record is stale.
local record = redis.pcall('HMGET', state_key, 'entry', 'digest', 'status', 'attempt', 'worker', 'crashes', 'solo', 'alone')
-- Only workers write here, so something else is no record, and is replaced like a stale one.
local is_junk = is_wrong_type(record)
if is_junk then record = {} end
if record.err then return record end
local this_entry = lane .. '/' .. entry_id
local state_attempt = tonumber(string.match(record[4] or '', '^%d+$') or '0')
if state_attempt >= LARGEST then state_attempt = 0 end
local is_same, is_stale = record[1] == this_entry, false
-- The entry, its group or its lane was deleted after the job was opened. Nobody can be given it, so whoever has it goes
-- on; the fence leaves one of them.
local is_begun = is_same and (record[3] == 'running' or record[3] == 'queued')
if #pending == 0 and not is_begun then return {'lost'} end
if record[1] and not is_same then
  local other_lane, other_id = string.match(record[1], '^(%a+)/(%d+%-%d+)$')
  local other_key = ({high = KEYS[5], normal = KEYS[6], low = KEYS[7]})[other_lane]
  -- A lane of another type answers with an error, which is no list either.
  local is_queued = other_key and #redis.pcall('XRANGE', other_key, other_id, other_id, 'COUNT', 1) > 0
  if is_queued or last_seq == TERMINAL then
    if record[2] == digest then return {'duplicate'} end
    return {'conflict'}
  end
  is_stale = true
end

-- 2. Ended already: the crash came between the terminal event and the settling.
if last_seq == TERMINAL then
  return {'ended', field(last_fields, 'e') or '', field(last_fields, 'code') or '', field(last_fields, 'usage') or false}
end

-- 3. The fence. ATTEMPT is this server's time, or one more than any earlier attempt.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local next_attempt = math.max(now, last_attempt + 1, state_attempt + 1, own_attempt + 1)
if next_attempt >= LARGEST then return {'blocked', reply_key} end
local attempt = string.format('%.0f', next_attempt)
-- A stale record of another job under this id: what it stored is no beginning of this one.
if is_stale and record[2] ~= digest then
  redis.call('DEL', reply_key)
  last_fields = {}
end
local covered = string.match(field(last_fields, 'n') or field(last_fields, 'from') or '', '^%d+$') or '0'
if #covered > 15 then covered = '0' end
local event = {'XADD', reply_key, attempt .. '-0', 'e', 'open', 't', string.format('%.0f', now),
  'worker', consumer, 'model', model, 'from', covered}
local added = redis.pcall(unpack(event))
if added.err then
  -- Somebody typed an id above all attempts and removed that event again.
  if string.find(added.err, 'equal or smaller', 1, true) then return {'blocked', reply_key} end
  redis.call(unpack(event))  -- so that the error comes in the server's words, which 6.2 changes in what is returned
end
redis.call('PEXPIRE', reply_key, run_ttl)

-- 4. The record. `running` under another worker says that this worker died with it.
local crashes, solo, alone = 0, 0, '0'
if is_same then
  crashes, solo = tonumber(record[6] or '0') or 0, tonumber(record[7] or '0') or 0
  if record[3] == 'running' and record[5] ~= consumer then
    crashes = crashes + 1
    if record[8] == '1' then solo = solo + 1 end
  elseif record[3] == 'running' and own_attempt > 0 and record[8] == '1' then
    alone = '1'  -- whoever runs it opens anew, since the server lost writes: it is as alone as before
  end
elseif is_stale or is_junk then
  redis.call('DEL', state_key)
end
redis.call('HSET', state_key, 'entry', this_entry, 'digest', digest, 'status', 'running', 'worker', consumer,
  'attempt', attempt, 'crashes', crashes, 'solo', solo, 'alone', alone, 'tenant', tenant,
  'opened', string.format('%.0f', now))
redis.call('PEXPIRE', state_key, run_ttl)
-- From here on the delivery count says how often the entry was delivered since it was last opened.
if #pending > 0 then
  redis.call('XCLAIM', lane_key, group, consumer, 0, entry_id, 'RETRYCOUNT', 0, 'JUSTID')
end

local mark = redis.pcall('GET', cancel_key)
if type(mark) == 'table' then mark = is_wrong_type(mark) and '' or false end
return {'opened', attempt, covered, crashes, solo, mark, is_same and (last and 1 or 2) or 0}
