#!/usr/bin/env bash
# A client of Pagemill out of bash and redis-cli. docs/clients/bash.md says how it behaves.
#
#   pagemill.sh submit QUEUE PROMPT [NAME VALUE]...   puts a job on the queue, prints its id; '' is no prompt
#   pagemill.sh stream QUEUE ID [LAST_ID]             prints the reply as it comes, from behind LAST_ID on
#   pagemill.sh status QUEUE ID                       queued, running, done, an error's code, or unknown
#   pagemill.sh cancel QUEUE ID [REASON]              asks for an end, wherever the job is
#
# REDIS_URL  the server (redis://localhost:6379)     REDIS_CLI  the program (redis-cli; valkey-cli does as well)
# RETRY_S    seconds to wait for a server (30)       LIMIT_S    the job's own time limit, in seconds (none)
# LANE       high, normal or low                     JOB_ID     an id of one's own (a random one)
# GONE_S     seconds after which a begun job of which neither record nor reply is left is given up (60)
#
# Exit codes: 0, 1 the job failed, 2 the server can't be used, 3 there is no reply to wait for, 64 wrong words.
set -u

: "${REDIS_URL:=redis://localhost:6379}" "${REDIS_CLI:=redis-cli}" "${RETRY_S:=30}" "${LIMIT_S:=}" "${GONE_S:=60}"

separator=$'\x1f'
is_in_doubt=
url=$REDIS_URL

# One command. `answer` is what the server said as CSV, which is one line with all else escaped. Lost connections are
# waited out: every command here may be sent twice.
ask() {
  local began=$SECONDS
  while true; do
    if answer=$("$REDIS_CLI" --no-auth-warning -u "$url" --csv "$@" 2>/dev/null </dev/null); then
      case $answer in
        ERROR,\"MOVED*) follow "${answer##* }" ;;
        ERROR,\"OOM* | ERROR,\"LOADING* | ERROR,\"BUSY* | ERROR,\"READONLY* | ERROR,\"MASTERDOWN* | \
          ERROR,\"ASK* | ERROR,\"CLUSTERDOWN* | ERROR,\"TRYAGAIN* | ERROR,\"NOREPLICAS* | ERROR,\"MISCONF* | ERROR,\"UNBLOCKED*) ;;
        ERROR,*) give_up 2 "$answer" ;;
        *) return ;;
      esac
    else
      answer=$("$REDIS_CLI" --no-auth-warning -u "$url" PING 2>&1 </dev/null) # what is wrong?
      [[ $answer != *AUTH* && $answer != *WRONGPASS* ]] || give_up 2 "$answer"
      answer="connection_lost: $answer"
      url=$REDIS_URL
    fi
    is_in_doubt=1
    ((SECONDS - began < RETRY_S)) || give_up 2 "$answer"
    sleep 0.3
  done
}

# Of a Cluster any node may be named: it says which one has the queue. Where that is gone, the first is asked again.
follow() {
  local scheme=${REDIS_URL%%://*} place=${REDIS_URL#*://} login=''
  [[ $place != *@* ]] || login=${place%@*}@
  url=$scheme://$login${1%\"}
}

give_up() {
  printf '%s\n' "$2" >&2
  exit "$1"
}

# The strings of `answer`, still escaped, as the array `words`. A quote inside a string is escaped, so "," parts them.
split_answer() {
  local line=${answer#\"} comma='","'
  line=${line%\"}
  IFS=$separator read -r -a words <<<"${line//$comma/$separator}${separator}end"
  unset "words[$((${#words[@]} - 1))]"
}

# Prints a string of `words` as it was before redis-cli escaped it.
say() {
  local quote='\"'
  printf '%b' "${1//"$quote"/\\x22}"
}

# The event that begins at words[at]: its id and the fields that matter. No field's name looks like an event's id.
next_event() {
  id=${words[at]} e='' text='' ids='[]' n='' from='' index=0 code='' message='' choices=''
  at=$((at + 1))
  while ((at < ${#words[@]})) && ! [[ ${words[at]} =~ ^[0-9]+-[0-9]+$ ]]; do
    case ${words[at]} in
      e | text | ids | code | message | choices) printf -v "${words[at]}" '%s' "${words[at + 1]}" ;;
      n | from | index) printf -v "${words[at]}" '%s' "${words[at + 1]//[!0-9]/}" ;; # they are counted with
    esac
    at=$((at + 2))
  done
  local commas=${ids//[!,]/}
  num_ids=$((${#commas} + 1))
  [[ $ids != '[]' ]] || num_ids=0
}

# Tokens that the reply holds once the event is in.
covered() {
  case $e in
    open) echo "${from:-0}" ;;
    reset) echo 0 ;;
    *) echo "${n:-0}" ;;
  esac
}

begin_anew() {
  [[ $last == 0-0 ]] || printf '\n[the reply began anew]\n'
  last=0-0 held=0 others=()
}

# The server may have forgotten the last event that was read, as in a failover: then all is read again.
check_last() {
  is_in_doubt=
  [[ $last != 0-0 ]] || return 0
  ask XRANGE "$key" "$last" "$last" COUNT 1
  if [[ $answer != \"* ]]; then
    begin_anew
    return
  fi
  split_answer
  at=0
  next_event
  if [[ $e == end || $e == error ]]; then exit 0; fi
  : "${held:=$(covered)}"
  [[ $held == "$(covered)" ]] || begin_anew
}

# Nothing came for a while: is there any hope?
check_hope() {
  status_of "$1" "$2"
  ask XLEN "$key"
  if [[ $status == queued || $status == running || $answer != 0 ]]; then
    gone_since=
    return
  fi
  # Without a record it may still wait in its lane, but not for longer than it may, and not if its reply has begun.
  if [[ $status == unknown ]] && { [[ -z $LIMIT_S ]] || ((SECONDS < LIMIT_S)); }; then
    [[ -n $has_begun ]] || return 0
    : "${gone_since:=$SECONDS}"
    ((SECONDS - gone_since >= GONE_S)) || return 0
  fi
  give_up 3 "reply_lost: job $2 is $status, and there is no reply: send it again"
}

# What the job's record says, as `status`.
status_of() {
  local at
  status=unknown
  ask HGETALL "pagemill:{$1}:state:$2"
  if [[ $answer == \"* ]]; then
    split_answer
    for ((at = 0; at < ${#words[@]}; at += 2)); do
      [[ ${words[at]} != status ]] || status=${words[at + 1]}
    done
  fi
}

stream() {
  key="pagemill:{$1}:reply:$2" last=${3:-0-0} held='' others=()
  local misfit='' came before has_begun=1 gone_since=''
  [[ $last != 0-0 ]] || held=0 has_begun=
  check_last
  while true; do
    before=$last
    ask XREAD BLOCK "$block_ms" COUNT 64 STREAMS "$key" "$last"
    came=$answer
    # Each redis-cli is a connection of its own, and may meet another server than the one before. Tokens and opens are
    # counted, but an end would not show that something before it was forgotten.
    case $came in
      *'"e","end"'* | *'"e","error"'* | [!\"]* | '') is_in_doubt=1 ;;
    esac
    [[ -z $is_in_doubt ]] || check_last
    [[ $last == "$before" ]] || continue
    if [[ $came != \"* ]]; then
      check_hope "$1" "$2"
      continue
    fi
    answer=$came has_begun=1 gone_since=
    split_answer
    at=1 # behind the key
    while ((at < ${#words[@]})); do
      next_event
      if { [[ $e == open ]] && ((${from:-$held} < held)); } || { [[ $e == token ]] && ((n - num_ids != held)); }; then
        [[ $misfit != "$id" ]] || give_up 3 "reply_broken: the reply doesn't fit together at event $id"
        misfit=$id
        begin_anew
        break
      fi
      [[ $e != reset ]] || begin_anew
      last=$id
      [[ $e != token ]] || held=$n
      if ((index == 0)); then say "$text"; else others[index]=${others[index]:-}$text; fi
      [[ -t 2 ]] || printf '%s %s\n' "$e" "$id" >&2
      [[ $e != end && $e != error ]] || return 0
    done
  done
}

# What comes after the last event: the other choices, or why the job failed.
finish() {
  local index
  for index in ${others[@]+"${!others[@]}"}; do
    printf '\n[choice %s]\n' "$index"
    say "${others[index]}"
  done
  [[ $choices != *'\"text\"'* ]] || { say "$choices"; echo; }
  [[ $e != error ]] || give_up 1 "$(say "$code: $message")"
}

wrong_words() {
  sed -n '4,7s/^#   //p' "$0" >&2
  exit 64
}

command -v "$REDIS_CLI" >/dev/null || give_up 2 "there is no $REDIS_CLI: install it, or name another with REDIS_CLI"
block_ms=4000
[[ -z $LIMIT_S ]] || block_ms=1000
case ${1-}-$# in
  submit-[3-9] | submit-[1-9][0-9]*)
    (($# % 2)) || wrong_words
    queue=$2 prompt=$3 lane=${LANE:-normal} id=${JOB_ID:-$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')}
    shift 3
    # Where the answer is lost it is sent again under the same id, which runs once.
    ask XADD "pagemill:{$queue}:jobs:$lane" '*' id "$id" ${prompt:+prompt "$prompt"} "$@"
    echo "$id"
    ;;
  stream-[34])
    stream "${@:2}"
    finish
    ;;
  status-3)
    status_of "$2" "$3"
    echo "$status"
    ;;
  cancel-[34])
    ask SET "pagemill:{$2}:cancel:$3" "${4:-cancelled by the client}" EX 86400
    ask XADD "pagemill:{$2}:control" MAXLEN '~' 1000 '*' op cancel id "$3"
    ;;
  *) wrong_words ;;
esac
