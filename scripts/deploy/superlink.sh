#!/usr/bin/env bash
# Start the operator's SuperLink, in the foreground: over TLS, for registered SuperNodes only,
# with a database that outlives it. Stop it with Ctrl-C or SIGTERM.
#   bash scripts/deploy/superlink.sh --certificates FOLDER --state FOLDER [--host ADDRESS] [--port N]
#     [--sessions FOLDER] [--scorer FILE]
#
#   --certificates  has ca.crt, server.pem and server.key (make_ca.sh)
#   --state         takes superlink.db (registered keys, runs), runs/ (reports) and models/
#   --host          address to listen on (default 127.0.0.1). Whoever reaches the port can start
#                   runs: see DEPLOY.md before it is another one
#   --port          default 8000
#   --sessions      takes the sockets of runs, to which the front passes what sites ask (nginx.conf has
#                   the same path, of at most 65 characters); without it, rounds take Flower's messages
#   --scorer        lets runs of mode "serve" listen; the file says where and for whom, and is read when
#                   such a run starts (docs/how-to/serve.md). It needs --sessions
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

certificates='' state='' host=127.0.0.1 port=8000 sessions='' scorer=''
while [ $# -gt 0 ]; do
  case $1 in
    --certificates) certificates=$(value "$@") ;;
    --state) state=$(value "$@") ;;
    --host) host=$(value "$@") ;;
    --port) port=$(value "$@") ;;
    --sessions) sessions=$(value "$@") ;;
    --scorer) scorer=$(value "$@") ;;
    *) wrong_usage "unknown argument: $1" ;;
  esac
  shift 2
done
need --certificates "$certificates"
need --state "$state"
certificates=$(absolute "$certificates")
state=$(absolute "$state")

need_file --certificates "$certificates/ca.crt"
need_file --certificates "$certificates/server.pem"
need_private --certificates "$certificates/server.key"
make_state_folder "$state"
use_environment "$state/flower"
# two SuperLinks on one database would give each run's messages to either
exec 9>"$state/superlink.lock"
flock -n 9 || fail "another SuperLink runs on $state"

# reports and models go below the state folder, as do relative paths of a run
export TP_FLOWER_HOME=$state
umask 077
if [ -n "$sessions" ]; then
  sessions=$(absolute "$sessions")
  [ ${#sessions} -le 65 ] || fail "--sessions: a socket's path has at most 108 characters: choose a shorter folder"
  mkdir -p -- "$sessions"
  # left by ServerApps that were killed
  rm -f -- "$sessions"/*.sock
  export TP_FLOWER_SESSIONS=$sessions
fi
if [ -n "$scorer" ]; then
  [ -n "$sessions" ] || fail "--scorer needs --sessions: without them an answer would take some 5 seconds"
  scorer=$(absolute "$scorer")
  need_file --scorer "$scorer"
  export TP_FLOWER_SCORER=$scorer
fi
cd -- "$state"
exec flower-superlink \
  --ssl-ca-certfile "$certificates/ca.crt" \
  --ssl-certfile "$certificates/server.pem" \
  --ssl-keyfile "$certificates/server.key" \
  --enable-supernode-auth \
  --database "$state/superlink.db" \
  --disable-runtime-dependency-installation \
  --host "$host" --port "$port"
