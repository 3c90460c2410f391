# Processes of demo.sh: started in the background, ended by their ids; to be sourced.
# shellcheck shell=bash
# shellcheck disable=SC2154 # work: the demo's folder

declare -A started=() # process id by name

# start NAME COMMAND...: run it in the background, with its output in a log of that name.
start() {
  local name=$1
  shift
  # a group of its own: Ctrl-C reaches this script alone, which ends the others in order
  setsid "$@" >"$work/log/$name" 2>&1 </dev/null &
  started[$name]=$!
}

# follow COMMAND...: run it and wait for it, so that a signal ends both at once.
follow() {
  local status=0
  setsid "$@" </dev/null &
  started[followed]=$!
  wait "${started[followed]}" || status=$?
  unset 'started[followed]'
  return "$status"
}

# is_running NAME
is_running() { kill -0 "${started[$1]}" 2>/dev/null; }

# descendants PID...: print the processes under these; some have groups of their own.
descendants() {
  local stat line pid parent found under=" $* "
  # /proc is in no order: go on until a pass finds no other
  while
    found=''
    for stat in /proc/[0-9]*/stat; do
      read -r line 2>/dev/null <"$stat" || continue
      pid=${line%% *}
      # after the name, which may hold anything: state, parent
      read -r _ parent _ <<<"${line##*) }"
      if [[ $under == *" $parent "* && $under != *" $pid "* ]]; then
        found+="$pid "
        under+="$pid "
      fi
    done
    [ -n "$found" ]
  do printf '%s' "$found"; done
}

# stop NAME...: end them politely, all at once; what is left after 15 seconds by force.
stop() {
  local name pid pids=() under deadline=$((SECONDS + 15))
  for name in "$@"; do
    pids+=("${started[$name]}")
  done
  under=$(descendants "${pids[@]}")
  kill -TERM "${pids[@]}" 2>/dev/null || true
  for name in "$@"; do
    while is_running "$name" && [ $SECONDS -lt $deadline ]; do sleep 0.1; done
    unset "started[$name]"
  done
  # shellcheck disable=SC2086 # numbers
  for pid in "${pids[@]}" $under; do
    kill -KILL "$pid" 2>/dev/null || true
  done
  wait "${pids[@]}" 2>/dev/null || true
}

# wait_until SECONDS WHAT NAME COMMAND...: until the command succeeds, while NAME runs.
wait_until() {
  local seconds=$1 what=$2 name=$3
  local deadline=$((SECONDS + seconds))
  shift 3
  until "$@" >"$work/log/waiting" 2>&1; do
    is_running "$name" || fail_with_log "$name" "$name ended before this held: $what"
    [ $SECONDS -lt $deadline ] || fail_with_log waiting "after $seconds seconds still not: $what"
    sleep 0.2
  done
}

# fail_with_log NAME WHAT
fail_with_log() {
  printf '\n--- the end of the log of %s\n' "$1" >&2
  tail -n 15 "$work/log/$1" >&2
  fail "$2"
}

# free_ports NUMBER: print as many ports of loopback that nobody listens on.
free_ports() {
  python - "$1" <<'PYTHON'
import socket
import sys

sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}
