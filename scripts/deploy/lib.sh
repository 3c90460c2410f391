# What the scripts of a deployment share; to be sourced.
# shellcheck shell=bash
#
# TP_FLOWER_VENV  where the environment is (default: .venv in the project; see lib.sh beside this folder)

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
# the scripts change their folder
venv=$(realpath -m -- "$venv")

# Print what stands at the top of the script that was called.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" >&2; }

# wrong_usage WHAT: for arguments that cannot be meant.
wrong_usage() {
  usage
  fail "$@"
}

# value OPTION [VALUE]: print the value of an option that must have one.
value() {
  if [ $# -lt 2 ] || [ -z "$2" ]; then
    fail "$1 needs a value"
  fi
  printf '%s\n' "$2"
}

# need OPTION VALUE: stop where an option was not given.
need() { [ -n "$2" ] || wrong_usage "$1 is missing"; }

# need_program PROGRAM PACKAGE: stop where a program is not installed.
need_program() {
  command -v "$1" >/dev/null || fail "$1 is not installed (on Debian and Ubuntu: apt-get install $2)"
}

# absolute PATH: print it absolute. Flower's processes have working directories of their own.
absolute() { realpath -m -- "$1"; }

# need_file WHAT PATH: stop where a file is missing or this user may not read it.
need_file() {
  [ -f "$2" ] || fail "$1: there is no file $2"
  [ -r "$2" ] || fail "$1: $(id -un) may not read $2"
}

# need_private WHAT PATH: stop where others could read a secret.
need_private() {
  need_file "$1" "$2"
  case $(stat -L -c %a -- "$2") in
    *0) ;;
    *) fail "$1: every user of this machine can read $2: chmod 600 it" ;;
  esac
}

# need_new PATH...: nothing is overwritten.
need_new() {
  local path
  for path in "$@"; do
    [ ! -e "$path" ] || fail "$path is there already; it is not overwritten: move it away first"
  done
}

# fingerprint CERTIFICATE: what two people compare over the telephone.
fingerprint() { openssl x509 -in "$1" -noout -fingerprint -sha256 | cut -d= -f2; }

# use_environment HOME: put Flower's programs on PATH, and what Flower writes into HOME.
use_environment() {
  [ -x "$venv/bin/flwr" ] ||
    fail "there is no environment in $venv: run 'bash scripts/deploy/install.sh' as a user who may write there"
  # a Python in somebody's home is nobody else's
  "$venv/bin/python" -c '' 2>/dev/null ||
    fail "$(id -un) may not run $(realpath -m -- "$venv/bin/python"), which the environment in $venv is" \
      "made with: remove it, and make it with PYTHON=/usr/bin/python3 bash scripts/deploy/install.sh"
  PATH=$venv/bin:$PATH
  export PATH FLWR_HOME=$1
  # the environment is complete: nothing is installed, fetched or told at run time
  export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
  export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 PYTHONUNBUFFERED=1
  # Flower's processes of one machine talk over loopback, which no proxy must get hold of
  export no_proxy="127.0.0.1,localhost,::1${no_proxy:+,$no_proxy}"
  export NO_PROXY=$no_proxy
}

# make_state_folder PATH: make it for this user alone, or refuse one that cannot be used.
make_state_folder() {
  (umask 077 && mkdir -p -- "$1") || fail "no folder can be made at $1"
  [ -w "$1" ] || fail "$(id -un) may not write to $1"
  case $(stat -c %a -- "$1") in
    *00) ;;
    *) fail "other users can look into $1: chmod 700 it" ;;
  esac
}
