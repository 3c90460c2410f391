#!/usr/bin/env bash
# Register a SuperNode's public key at the SuperLink, before the SuperNode starts; the operator
# runs it. Prints the node's id.
#   bash scripts/deploy/register.sh CONNECTION PUBLIC_KEY [NAME]
# CONNECTION: of connect.sh. NAME: what `flwr supernode list CONNECTION` calls the node.
# To take a SuperNode out again: flwr supernode unregister NODE_ID CONNECTION
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -eq 2 ] || [ $# -eq 3 ] || wrong_usage "connection and public key are needed"
connection=$1 key=$(absolute "$2") name=${3:-}
need_program ssh-keygen openssh-client
need_file PUBLIC_KEY "$key"
print=$(ssh-keygen -lf "$key" 2>&1 | cut -d' ' -f2-) || fail "$key is no public key: $print"
print=${print%% *}
if grep -q 'PRIVATE KEY' "$key"; then
  fail "$key is a private key: it belongs to the SuperNode alone; register $key.pub"
fi
use_environment "${FLWR_HOME:-$HOME/.flwr}"
say "registering the key with fingerprint $print"
answer=$(flwr supernode register "$key" "$connection" ${name:+--name "$name"} --format json) ||
  fail "$connection did not register it: $answer"
"$venv/bin/python" -c '
import json, sys
answer = json.loads(sys.argv[1])
if not answer.get("success"):
    reason = str(answer.get("error-message", answer)).strip().splitlines()[-1]
    sys.exit(f"error: not registered: {reason}")
print(answer["node-id"])
' "$answer"
