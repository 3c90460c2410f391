#!/usr/bin/env bash
# Make the key by which a SuperNode is known to the SuperLink. The data owner runs it.
#   bash scripts/deploy/make_node_key.sh FILE
#
#   FILE      the private key: it stays with the SuperNode, one SuperNode to a key
#   FILE.pub  the public key: the operator registers it (register.sh)
#
# Prints the fingerprint, which owner and operator compare by another way than the file came.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -eq 1 ] || wrong_usage "the file's name is the only argument"
need_program ssh-keygen openssh-client
file=$(absolute "$1")
need_new "$file" "$file.pub"
umask 077
mkdir -p -- "$(dirname "$file")"
# the curve that Flower's documentation has; no passphrase: a service reads the key
ssh-keygen -q -t ecdsa -b 384 -N "" -C "$(basename "$file")" -f "$file"
chmod 644 "$file.pub"
say "$file stays here, $file.pub goes to the operator; its fingerprint:"
ssh-keygen -lf "$file.pub" | cut -d' ' -f2
