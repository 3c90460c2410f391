#!/usr/bin/env bash
# Tell the operator's flwr where the SuperLink is: adds a connection to the config.toml in
# $FLWR_HOME, by default ~/.flwr. Then `flwr run . NAME --stream` runs the app there.
#   bash scripts/deploy/connect.sh NAME HOST:PORT CA
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -eq 3 ] || wrong_usage "name, address and ca.crt are needed"
name=$1 address=$2 ca=$(absolute "$3")
case $name in
  *[!a-z0-9-]* | '') fail "a name has small letters, digits and '-', not '$name'" ;;
esac
[[ $address =~ ^[^/]+:[0-9]+$ ]] || fail "an address is HOST:PORT, not '$address'"
need_file CA "$ca"
home=${FLWR_HOME:-$HOME/.flwr}
mkdir -p -- "$home"
file=$home/config.toml
if grep -qsF "[superlink.$name]" "$file"; then
  fail "$file has a connection '$name' already"
fi
# Flower wants an absolute path here
printf '\n[superlink.%s]\naddress = "%s"\nroot-certificates = "%s"\n' "$name" "$address" "$ca" >>"$file"
say "$file knows '$name' now: flwr run . $name --stream"
