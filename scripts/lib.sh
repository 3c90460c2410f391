# What quickstart.sh, test.sh and .ci/run share; to be sourced.
# shellcheck shell=bash
#
# TP_FLOWER_VENV  where the environment is or will be (default: .venv in the project)
# PYTHON          the Python to make it with (default: the first one >= 3.11 found)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TP_FLOWER_VENV:-$root/.venv}

say() { printf '\n== %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Print the first Python that is new enough and can make environments.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python >= 3.11 with the venv module found (on Debian and Ubuntu: install" \
    "python3-venv); set PYTHON=/path/to/python to name one"
}

# What the environment was made from, and for which folder: it is updated for others.
environment_stamp() {
  "$1" - "$root/pyproject.toml" "$root/constraints.txt" <<'PYTHON'
import hashlib, sys
parts = [sys.prefix.encode()]
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        parts += [path.encode(), file.read()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

# Make an environment without packages; what is left of an interrupted attempt is replaced.
make_environment() {
  local python
  python=$(find_python)
  say "making an environment in $venv with $("$python" --version); this takes a minute or two"
  "$python" -m venv --clear "$venv" || fail "could not make an environment in $venv"
  # that of a Python of some years ago takes half as long again; it will do
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade pip || true
}

# ensure_environment [EXTRA...]: make or reuse the environment with all that runs may need (extra `all`); `dev` adds
# the tools of tests, `docs` those of the site.
ensure_environment() {
  local stamp extra extras=("${@:-all}") missing=()
  if [ -x "$venv/bin/python" ]; then
    stamp=$(environment_stamp "$venv/bin/python")
    # an environment with the tools of tests or of the site can do runs as well
    for extra in "${extras[@]/#all/*}"; do
      # shellcheck disable=SC2086 # the others have `all` within them: any stamp will do
      cat "$venv"/tp-flower-$extra.stamp 2>/dev/null | grep -qx "$stamp" || missing+=("$extra")
    done
    if [ ${#missing[@]} = 0 ]; then
      return
    fi
    say "updating the environment in $venv"
  else
    make_environment
    stamp=$(environment_stamp "$venv/bin/python")
  fi
  # what was installed for an older stamp is installed again when it is asked for
  for extra in "$venv"/tp-flower-*.stamp; do
    grep -qsx "$stamp" "$extra" || rm -f "$extra"
  done
  # twice quiet: without the warnings of indexes that lack a package
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "$root[$(IFS=,; echo "${extras[*]}")]" ||
    fail "the installation into $venv failed; once the cause is gone, run this again"
  for extra in "${extras[@]}"; do
    printf '%s\n' "$stamp" >"$venv/tp-flower-$extra.stamp"
  done
}

# ensure_database_servers: install PostgreSQL and MariaDB for the tests, where apt-get can.
# The tests start servers of their own; where these are missing, they are skipped.
ensure_database_servers() {
  local packages=()
  compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null ||
    packages+=(postgresql)
  PATH="$PATH:/usr/sbin" command -v mariadbd >/dev/null || packages+=(mariadb-server)
  [ ${#packages[@]} -gt 0 ] || return 0
  install_packages "${packages[@]}" ||
    say "${packages[*]} cannot be had: the tests of these databases are skipped"
}

# install_packages PACKAGE...: install Debian packages, whose services are not started.
install_packages() {
  local prefix=() log status=0
  if [ "$(id -u)" != 0 ]; then
    prefix=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null || ! "${prefix[@]}" true 2>/dev/null; then
    say "cannot install $* (needs apt-get and root)"
    return 1
  fi
  say "installing $*"
  log=$(mktemp)
  # RUNLEVEL=1: Debian's packages start no service in single-user mode
  apt() {
    "${prefix[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
      apt-get -y --no-install-recommends "$@" >>"$log" 2>&1
  }
  # the lists of packages may be missing or old
  if ! apt install "$@" && ! { apt update && apt install "$@"; }; then
    tail -n 5 "$log" >&2
    status=1
  fi
  rm -f "$log"
  return $status
}
