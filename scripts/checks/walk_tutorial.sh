#!/usr/bin/env bash
# Walk the tutorial as a newcomer would, on the music shop: explain, train, predict.
#   bash scripts/checks/walk_tutorial.sh [--csv]
# The till's tables lie in a throw-away PostgreSQL; with --csv, or where there is none, in CSV files.
# Takes a minute; needs the environment that quickstart.sh makes.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"
# shellcheck source=scripts/deploy/processes.sh
source "$root/scripts/deploy/processes.sh"
# shellcheck source=scripts/deploy/databases.sh
source "$root/scripts/deploy/databases.sh"
[ -x "$venv/bin/python" ] || fail "there is no environment in $venv: scripts/quickstart.sh makes one"
export PATH=$venv/bin:$PATH

work=$(mktemp -d) databases='' till=()
finish() {
  [ ${#started[@]} -eq 0 ] || stop "${!started[@]}"
  rm -rf "$work" ${databases:+"$databases"}
}
trap finish EXIT
mkdir "$work/log"
export TP_FLOWER_HOME=$work/home
if [ "${1:-}" != --csv ] && compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
  read -r port < <(free_ports 1)
  databases=$(mktemp -d)
  chmod 711 "$databases"
  password=$(openssl rand -hex 16)
  start_postgresql "$port" "$password"
  server=postgresql://$database_user:$password@127.0.0.1:$port
  wait_until 60 "PostgreSQL answers" postgresql make_database "$server/postgres" music
  export MUSIC_URI=$server/music
  till=(--postgresql "$MUSIC_URI")
fi

cd "$root"
say "make the shop"
python scripts/data/make_music_shop.py "$work/shop" "${till[@]}"
for command in "check regression" "explain explain" "train regression" "predict predict" \
  "evaluate predict" "train classification" "train plays"; do
  read -r verb run <<<"$command"
  say "tp-flower $verb $run.toml"
  tp-flower "$verb" "$work/shop/$run.toml"
done
