#!/usr/bin/env bash
# Make the operator's certificate authority (CA) and the SuperLink's certificate.
#   bash scripts/deploy/make_ca.sh FOLDER NAME [NAME...]
# NAME: every DNS name and IP address under which SuperNodes and operators reach the
# SuperLink; localhost, 127.0.0.1 and ::1 are added, which its own processes use.
#
#   ca.key      signs certificates: keep it offline, it is not needed to run anything
#   ca.crt      what every SuperNode and operator is given
#   server.key  the SuperLink's; server.pem is its certificate, valid for 398 days
#
# Where FOLDER has ca.key and ca.crt but no server.key and server.pem, the CA signs a new
# certificate: so one is renewed, and no SuperNode need know. Nothing is overwritten.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -ge 2 ] || wrong_usage "a folder and a name are the least"
need_program openssl openssl
folder=$(absolute "$1")
shift

names=DNS:localhost,IP:127.0.0.1,IP:::1
for name in "$@"; do
  case $name in
    localhost | 127.0.0.1 | ::1) ;;
    *[!0-9A-Za-z.:*-]*) fail "$name is no host name and no IP address" ;;
    *:*) names+=,IP:$name ;;
    *[!0-9.]*) names+=,DNS:$name ;;
    *) names+=,IP:$name ;;
  esac
done

umask 077
mkdir -p -- "$folder"
cd -- "$folder"
need_new server.key server.pem
if [ ! -e ca.key ] && [ ! -e ca.crt ]; then
  openssl ecparam -name prime256v1 -genkey -noout -out ca.key
  openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/CN=tp_flower CA of $1" \
    -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign -out ca.crt
elif [ ! -e ca.key ] || [ ! -e ca.crt ]; then
  fail "$folder has one of ca.key and ca.crt: both are needed to sign, none to make new ones"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
openssl ecparam -name prime256v1 -genkey -noout -out "$scratch/server.key"
openssl req -new -key "$scratch/server.key" -subj "/CN=$1" -out "$scratch/request"
printf '%s\n' "subjectAltName=$names" extendedKeyUsage=serverAuth basicConstraints=critical,CA:FALSE \
  keyUsage=critical,digitalSignature >"$scratch/extensions"
# 398 days: what clients accept at most of a server
openssl x509 -req -in "$scratch/request" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
  -days 398 -sha256 -extfile "$scratch/extensions" -out "$scratch/server.pem" 2>"$scratch/log" ||
  fail "openssl could not sign: $(cat "$scratch/log")"
mv -- "$scratch/server.key" "$scratch/server.pem" .
# certificates are public; the keys stay 0600
chmod 644 ca.crt server.pem

cat >&2 <<TEXT

$folder/server.pem is for $names
  until $(openssl x509 -in server.pem -noout -enddate | cut -d= -f2)

Give every SuperNode $folder/ca.crt, and its owner by another way the fingerprint:
TEXT
fingerprint ca.crt
