#!/usr/bin/env bash
# Start an organisation's SuperNode, in the foreground. Stop it with Ctrl-C or SIGTERM.
#   bash scripts/deploy/supernode.sh --superlink HOST:PORT --ca FILE --key FILE --tables FILE --state FOLDER
#     --allowed-apps FILE [--port N] [--allowed-keys FILE | --keys unchecked]
#     [--cache-gb N] [--check]
#
#   --superlink     the operator's; the certificate must name HOST
#   --ca            ca.crt, as the operator gave it
#   --key           this SuperNode's private key (make_node_key.sh), registered by the operator
#   --tables        what this organisation holds (docs/how-to/connect-sources.md)
#   --state         keys, privacy ledger, models and cache: one SuperNode to a folder, back it up
#   --allowed-apps  lines with the SHA-256 of the app bundles that may run here (app_hash.sh)
#   --port          on loopback, for the SuperNode's own processes (default 9094; one SuperNode to a port)
#   --allowed-keys  the other sites' public keys; without them, a query over several sites needs
#                   --keys unchecked: the server is trusted with the keys
#   --cache-gb      gigabytes that the cache may take (default 20; docs/how-to/connect-sources.md)
#   --check         try the files, the tables and the way to the SuperLink, and start nothing
#
# A SuperNode that is refused exits; whoever supervises it starts it again. After a kill -9 the
# SuperLink refuses the same key for up to a minute.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

superlink='' ca='' key='' tables='' state='' port=9094 is_check=false
allowed_apps='' allowed_keys='' keys='' cache_gb=''
while [ $# -gt 0 ]; do
  case $1 in
    --check)
      is_check=true
      shift
      continue
      ;;
    --superlink) superlink=$(value "$@") ;;
    --ca) ca=$(value "$@") ;;
    --key) key=$(value "$@") ;;
    --tables) tables=$(value "$@") ;;
    --state) state=$(value "$@") ;;
    --allowed-apps) allowed_apps=$(value "$@") ;;
    --port) port=$(value "$@") ;;
    --allowed-keys) allowed_keys=$(value "$@") ;;
    --keys) keys=$(value "$@") ;;
    --cache-gb) cache_gb=$(value "$@") ;;
    *) wrong_usage "unknown argument: $1" ;;
  esac
  shift 2
done
need --superlink "$superlink"
need --ca "$ca"
need --key "$key"
need --tables "$tables"
need --state "$state"
need --allowed-apps "$allowed_apps"
[[ $superlink =~ ^[^/]+:[0-9]+$ ]] || fail "--superlink is HOST:PORT, not '$superlink'"
ca=$(absolute "$ca")
key=$(absolute "$key")
tables=$(absolute "$tables")
state=$(absolute "$state")
allowed_apps=$(absolute "$allowed_apps")

# the node config is read as key="value" pairs
config=''
add() {
  case $2 in
    *[\"\\]*) fail "$1: a path with a quote or a backslash cannot be told to Flower: $2" ;;
  esac
  config+="${config:+ }$1=\"$2\""
}
add tables "$tables"
add state-dir "$state"
# sessions go the way that Flower's messages go
add session-front "https://$superlink"
add session-ca "$ca"
need_file --ca "$ca"
need_private --key "$key"
need_file --tables "$tables"
need_file --allowed-apps "$allowed_apps"
if [ -n "$allowed_keys" ]; then
  allowed_keys=$(absolute "$allowed_keys")
  need_file --allowed-keys "$allowed_keys"
  add allowed-keys "$allowed_keys"
fi
if [ -n "$keys" ]; then
  [ "$keys" = unchecked ] || fail "--keys can be unchecked only, not '$keys'"
  add keys "$keys"
fi
[ -z "$cache_gb" ] || config+=" cache-gb=$cache_gb"
make_state_folder "$state"
use_environment "$state/flower"
# modules of the project, also where it is not installed
cd -- "$root"

# files that cannot be used stop it here, and not in the middle of a run
check_files() {
  python - "$tables" "$allowed_apps" "$allowed_keys" <<'PYTHON'
import sys
from client_apps.data.key_files import read_allowed_apps, read_allowed_keys
from tp_flower.errors import TPFlowerError
from tp_flower.sources.shards import load_tables

tables, allowed_apps, allowed_keys = sys.argv[1:]
try:
    load_tables(tables)
    read_allowed_apps(allowed_apps)
    if allowed_keys:
        read_allowed_keys(allowed_keys)
except TPFlowerError as error:
    sys.exit(f"error: {error}")
PYTHON
}

check_tables() {
  python - "$tables" "$state" "$allowed_keys" <<'PYTHON'
import sys
from client_apps.privacy.table_checks import check_tables
from tp_flower.errors import TPFlowerError

try:
    for line in check_tables(*sys.argv[1:]):
        print(line)
except TPFlowerError as error:
    sys.exit(f"error: {error}")
PYTHON
}

check_superlink() {
  local host=${superlink%:*} answer
  host=${host#[}
  host=${host%]}
  local option=-verify_hostname
  [[ ! $host =~ ^[0-9.]+$ && $host != *:* ]] || option=-verify_ip
  need_program openssl openssl
  answer=$(timeout 20 openssl s_client -connect "$superlink" -CAfile "$ca" -verify_return_error \
    "$option" "$host" -brief </dev/null 2>&1) ||
    fail "no TLS connection to $superlink that $ca vouches for: $(tail -n 3 <<<"$answer")"
  printf '  %s: reached, its certificate is good\n' "$superlink"
}

check_files
if $is_check; then
  say "the tables, as $(id -un) reads them"
  check_tables
  say "what they have spent of their budgets"
  python -m tp_flower.command_line account --tables "$tables" --state-dir "$state"
  say "the SuperLink, under the CA $(fingerprint "$ca")"
  check_superlink
  say "all is well; nothing was started"
  exit
fi

# two SuperNodes in one folder would mix up their keys and ledgers; the lock ends with the process
exec 9>"$state/supernode.lock"
flock -n 9 || fail "another SuperNode runs with the state folder $state"

# how often it looks for a message to answer, in seconds: Flower's 1 is paid in every round. An
# idle SuperNode takes about 5% of a core for it; 0.05 takes 7%, 0.2 takes 3%
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=${FLWR_SUPEREXEC_TASK_POLL_INTERVAL:-0.1}
umask 077
cd -- "$state"
# Flower takes an installed bundle for the one it was sent if the first 8 digits of their hashes
# agree: none is left of a time when others may have been let in
rm -rf -- "$state/flower/apps"
exec python -P -m client_apps.supernode --allowed-apps "$allowed_apps" \
  --superlink "$superlink" --root-certificates "$ca" --auth-supernode-private-key "$key" \
  --port "$port" --node-config "$config"
