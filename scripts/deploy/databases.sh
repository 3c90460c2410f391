# The two database servers of demo.sh, on loopback, with a password; to be sourced.
# shellcheck shell=bash
# shellcheck disable=SC2154 # work: the demo's folder

database_user=tp_reader

# start_databases PORT PORT: start PostgreSQL and MariaDB; set planes_uri and weather_uri.
start_databases() {
  local password
  password=$(openssl rand -hex 16)
  planes_uri=postgresql://$database_user:$password@127.0.0.1:$1/fleet
  weather_uri=mariadb://$database_user:$password@127.0.0.1:$2/met
  # another folder than the demo's: it belongs to the servers' accounts
  databases=$(mktemp -d)
  chmod 711 "$databases"
  start_postgresql "$1" "$password"
  start_mariadb "$2" "$password"
  wait_until 60 "PostgreSQL answers" postgresql make_database "${planes_uri%/fleet}/postgres" fleet
  wait_until 60 "MariaDB answers" mariadb make_database "${weather_uri%/met}/mysql" met
}

# make_account_folder ACCOUNT NAME: set folder and as, the command that runs others as ACCOUNT.
make_account_folder() {
  folder=$databases/$2
  as=(env -C /)
  mkdir "$folder"
  # both servers refuse to run as root
  if [ "$(id -u)" = 0 ]; then
    chown "$1" "$folder"
    as+=(setpriv --reuid "$1" --regid "$1" --init-groups)
  fi
}

# write_as_account NAME: write standard input to a file of the account's folder, for it alone.
write_as_account() {
  # shellcheck disable=SC2016 # $1 is the inner shell's
  "${as[@]}" sh -c 'umask 077 && cat >"$1"' sh "$folder/$1"
}

start_postgresql() {
  local folder as programs
  programs=$(compgen -G '/usr/lib/postgresql/*/bin' | sort -V | tail -n 1)
  make_account_folder postgres postgresql
  write_as_account password <<<"$2"
  "${as[@]}" "$programs/initdb" -D "$folder/data" -U "$database_user" --no-sync -E UTF8 --no-locale \
    -A scram-sha-256 --pwfile="$folder/password" >"$work/log/initdb" 2>&1 ||
    fail "initdb: $(tail -n 5 "$work/log/initdb")"
  # no fsync: the rows are thrown away
  start postgresql "${as[@]}" "$programs/postgres" -D "$folder/data" -c listen_addresses=127.0.0.1 \
    -c port="$1" -c unix_socket_directories= -c fsync=off -c shared_buffers=16MB
}

start_mariadb() {
  local folder as
  make_account_folder mysql mariadb
  "${as[@]}" mariadb-install-db --no-defaults --datadir="$folder/data" --skip-test-db --tmpdir="$folder" \
    --auth-root-authentication-method=normal --innodb-log-file-size=4M >"$work/log/mariadb-install-db" 2>&1 ||
    fail "mariadb-install-db: $(tail -n 5 "$work/log/mariadb-install-db")"
  write_as_account users.sql <<SQL
CREATE USER '$database_user'@'127.0.0.1' IDENTIFIED BY '$2';
GRANT ALL ON *.* TO '$database_user'@'127.0.0.1';
SQL
  start mariadb "${as[@]}" mariadbd --no-defaults --datadir="$folder/data" --socket="$folder/socket" \
    --port="$1" --init-file="$folder/users.sql" --tmpdir="$folder" --bind-address=127.0.0.1 \
    --skip-name-resolve --character-set-server=utf8mb4 --innodb-buffer-pool-size=16M \
    --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF
}

# make_database URI NAME
make_database() {
  python - "$@" <<'PYTHON'
import sys
from pathlib import Path

import sqlalchemy as sa

from tp_flower.sources.databases.session import parse_url

url = parse_url(sys.argv[1], {}, Path.cwd(), "the database").url
with sa.create_engine(url, isolation_level="AUTOCOMMIT").connect() as connection:
    connection.exec_driver_sql(f"CREATE DATABASE {sys.argv[2]}")
PYTHON
}
