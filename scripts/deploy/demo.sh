#!/usr/bin/env bash
# A whole deployment on this machine: five organisations with a SuperNode each, planes in PostgreSQL,
# weather in MariaDB, the rest in files; a SuperLink over TLS with node authentication behind a
# front. The owners are strict: each has a policy, pins the others' keys, names its partners, lists
# the app that may run, and approves each run. Trains, predicts, prints the report, and compares with
# the simulation of the same run.
#   bash scripts/deploy/demo.sh [--install] [--keep FOLDER] [--channel session|flower]
#
#   --install  install the Debian packages that are missing (apt-get, as root or with sudo)
#   --keep     leave reports, predictions and logs in FOLDER
#   --channel  how rounds travel: in sessions (the default), or as Flower's messages
#
# Everything listens on 127.0.0.1, lies in a temporary folder, and is stopped by its process id
# at the end, on failure and on Ctrl-C. Exit status 0: all of it worked.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/deploy/processes.sh
source "$root/scripts/deploy/processes.sh"
# shellcheck source=scripts/deploy/databases.sh
source "$root/scripts/deploy/databases.sh"

deploy=$root/scripts/deploy
organisations=(EWR JFK LGA registry directory)

install=false keep='' channel=session
while [ $# -gt 0 ]; do
  case $1 in
    --install) install=true ;;
    --keep)
      keep=$(value "$@")
      keep=$(absolute "$keep")
      shift
      ;;
    --channel)
      channel=$(value "$@")
      shift
      ;;
    *) wrong_usage "unknown argument: $1" ;;
  esac
  shift
done

missing_packages() {
  command -v openssl >/dev/null || echo openssl
  command -v ssh-keygen >/dev/null || echo openssh-client
  command -v nginx >/dev/null || echo nginx-light
  command -v mariadbd >/dev/null || echo mariadb-server
  compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || echo postgresql
}

finish() {
  local status=$?
  trap '' INT TERM
  # SuperNodes first: they tell the SuperLink that they go
  local name others=()
  for name in "${!started[@]}"; do
    case $name in
      site-*) ;;
      *) others+=("$name") ;;
    esac
  done
  # shellcheck disable=SC2046 # names without spaces
  stop $(printf '%s\n' "${!started[@]}" | grep '^site-')
  stop "${others[@]}"
  if [ -n "$keep" ] && [ -d "$work" ]; then
    mkdir -p "$keep"
    cp -r "$work/log" "$work/link/runs" "$keep" 2>/dev/null || true
  fi
  rm -rf "$work" ${databases:+"$databases"}
  exit "$status"
}

PATH=$PATH:/usr/sbin
mapfile -t missing < <(missing_packages)
if [ ${#missing[@]} -gt 0 ]; then
  $install || fail "these Debian packages are missing: ${missing[*]}" \
    "(apt-get install ${missing[*]}, or call this with --install)"
  install_packages "${missing[@]}" || fail "could not install ${missing[*]}"
fi
# shellcheck disable=SC2119 # without the tools of tests
ensure_environment

umask 077
work=$(mktemp -d) databases=''
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$work/log" "$work/sites"
use_environment "$work/operator"
# the flights' files are made here, and nothing is left in the user's home
export TP_FLOWER_HOME=$work/home
cd "$root"
read -r port front planes_port weather_port rejected_port node_ports < <(free_ports 10)

# supernode ORGANISATION PORT [CA]: set command, which starts its SuperNode.
supernode() {
  local site=$work/sites/$1
  command=(bash "$deploy/supernode.sh" --superlink "127.0.0.1:$front" --ca "${3:-$work/ca/ca.crt}"
    --key "$site/node.key" --tables "$site/tables.toml" --state "$site/state" --port "$2"
    --allowed-apps "$work/apps.txt" --allowed-keys "$work/keys.txt")
}

# rejected WHAT PATTERN ORGANISATION [CA]: its SuperNode must end by itself, for that reason.
rejected() {
  local what=$1 pattern=$2 command status=0
  supernode "$3" "$rejected_port" "${4:-}"
  follow timeout 60 "${command[@]}" >"$work/log/rejected" 2>&1 || status=$?
  if [ "$status" = 0 ] || [ "$status" = 124 ] || ! grep -qE "$pattern" "$work/log/rejected"; then
    fail_with_log rejected "$what was not rejected as it should be (exit status $status)"
  fi
  printf '  %s: rejected (%s)\n' "$what" "$(grep -oEm 1 "$pattern" "$work/log/rejected")"
}

# online NUMBER: whether as many SuperNodes are.
online() {
  flwr supernode list demo --format json | python -c '
import json, sys
nodes = json.load(sys.stdin)["nodes"]
sys.exit(sum(node["status"] == "online" for node in nodes) != int(sys.argv[1]))' "$1"
}

# run_app NAME SETTINGS [CHECKOUT]: run an app on the SuperLink; set results, the folder of its report.
run_app() {
  local log=$work/log/run-$1 id details
  follow flwr run "${3:-.}" demo --stream -c "$2" > >(tee "$log") 2>&1 || fail_with_log "run-$1" "flwr run failed"
  id=$(sed -n 's/^Successfully started run \([0-9]*\).*/\1/p' "$log")
  # the exit status of flwr tells of the stream, not of the run
  details=$(flwr ls demo --run-id "$id" --format json)
  grep -q '"finished:completed"' <<<"$details" || fail "the run did not complete: $details"
  results=$(dirname "$(sed -n 's/^Report: //p' "$log")")
}

# approved_run NAME SETTINGS: run an app that is refused until all owners have approved the run, from
# the proposal that the operator gives them; set results.
approved_run() {
  local name proposal
  if (run_app "$1-refused" "$2") >"$work/log/$1-refused" 2>&1; then
    fail "a run that no owner has approved was carried out"
  fi
  grep -om 1 "(approved-runs) refuses: the run sha256:[0-9a-f]* is not approved" "$work/log/$1-refused" ||
    fail_with_log "$1-refused" "a run that no owner has approved failed for another reason"
  proposal=$(sed -n 's/^Results will be in //p' "$work/log/run-$1-refused")/proposal.json
  for name in "${organisations[@]}"; do
    python -m tp_flower.command_line approve "$proposal" --yes --tables "$work/sites/$name/tables.toml" \
      --state-dir "$work/sites/$name/state" >"$work/log/approve-$name"
    tail -n 1 "$work/log/approve-$name"
  done
  run_app "$1" "$2"
}

# the built-in query of columns alone: strict policies refuse expressions
sql="SELECT f.arr_delay AS label, f.month, f.day, f.hour, f.minute, f.sched_arr_time, f.distance, f.carrier,
  f.origin, p.year AS plane_year, p.type, p.manufacturer, p.model, p.engines, p.seats, p.engine, w.temp, w.dewp,
  w.humid, w.wind_dir, w.wind_speed, w.precip, w.pressure, w.visib, a.lat, a.lon, a.alt, a.tz, a.dst, a.tzone
FROM flights AS f
JOIN planes AS p ON f.tailnum = p.tailnum
JOIN weather AS w ON f.origin = w.origin AND f.time_hour = w.time_hour
JOIN airports AS a ON f.dest = a.faa"

# write_policies FILE TABLE...: add the first policies of an owner's tables to the tables file, and
# allow in them what the query needs.
write_policies() {
  local file=$1 table
  shift
  python -m tp_flower.command_line policy --tables "$file" >"$work/policies.toml"
  sed 's/^# models = .*/models = ["linear", "trees"]/' "$work/policies.toml" >>"$file"
  for table in "$@"; do
    case $table in
      flights)
        allow "$file" flights columns month day hour minute sched_arr_time distance carrier origin
        allow "$file" flights labels arr_delay
        allow "$file" flights keys tailnum origin time_hour dest flight
        ;;
      weather)
        allow "$file" weather columns temp dewp humid wind_dir wind_speed precip pressure visib
        allow "$file" weather keys origin time_hour
        ;;
      planes)
        allow "$file" planes columns year type manufacturer model engines seats engine
        allow "$file" planes keys tailnum
        ;;
      airports)
        allow "$file" airports columns lat lon alt tz dst tzone
        allow "$file" airports keys faa
        ;;
    esac
  done
}

# restrict FILE: to runs that the owner approves, with the partners whose keys it has.
restrict() {
  local others
  others=$(printf '"%s", ' "${organisations[@]}")
  sed -i -e "s/^# approved-runs = .*/approved-runs = []/" -e "s/^# partners = .*/partners = [${others%, }]/" "$1"
}

# allow FILE TABLE LIST COLUMN...: take the # from these lines of a list in the table's policy.
allow() {
  python - "$@" <<'PYTHON'
import sys
from pathlib import Path

file, table, name, *columns = sys.argv[1:]
before, policy, after = Path(file).read_text().partition(f'[tables."{table}".policy]\n')
earlier, start, rest = after.partition(f"\n{name} = [\n")
lines, end, later = rest.partition("\n]\n")
for column in columns:
    if f'# "{column}",' not in lines:
        sys.exit(f"error: {name} of {table} in {file} has no line of {column}")
    lines = lines.replace(f'# "{column}",', f'"{column}",')
Path(file).write_text("".join((before, policy, earlier, start, lines, end, later)))
PYTHON
}

# leave_out_cancelled FILE: flights that have not arrived; a strict policy lets no query choose rows.
leave_out_cancelled() {
  python - "$1" <<'PYTHON'
import sys

import pandas as pd

pd.read_parquet(sys.argv[1]).dropna(subset="arr_delay").to_parquet(sys.argv[1], index=False)
PYTHON
}

say "two database servers, and the tables of five organisations"
start_databases "$planes_port" "$weather_port"
python scripts/data/load_flights.py "$work/data" --planes "$planes_uri" --weather "$weather_uri"
for name in "${organisations[@]}"; do
  mkdir "$work/sites/$name"
done
for name in EWR JFK LGA; do
  site=$work/sites/$name
  leave_out_cancelled "$work/data/flights-$name.parquet"
  cp "$work/data/flights-$name.parquet" "$site"
  # the password stays out of the tables file
  printf '%s\n' "$weather_uri" >"$site/weather.uri"
  {
    printf '[tables.flights]\npath = "flights-%s.parquet"\nsite = "%s"\n\n' "$name" "$name"
    printf '[tables.weather]\nuri-file = "weather.uri"\ntable = "weather_%s"\nsite = "%s"\n' "${name,,}" "$name"
  } >"$site/tables.toml"
  write_policies "$site/tables.toml" flights weather
  restrict "$site/tables.toml"
done
printf '%s\n' "$planes_uri" >"$work/sites/registry/planes.uri"
printf '[tables.planes]\nuri-file = "planes.uri"\ntable = "planes"\nsite = "registry"\n' \
  >"$work/sites/registry/tables.toml"
write_policies "$work/sites/registry/tables.toml" planes
restrict "$work/sites/registry/tables.toml"
cp "$work/data/airports.csv" "$work/sites/directory"
printf '[tables.airports]\npath = "airports.csv"\nsite = "directory"\n' >"$work/sites/directory/tables.toml"
write_policies "$work/sites/directory/tables.toml" airports
restrict "$work/sites/directory/tables.toml"

say "a CA, the SuperLink's certificate, and a key for every SuperNode"
bash "$deploy/make_ca.sh" "$work/ca" localhost
bash "$deploy/make_ca.sh" "$work/other-ca" localhost >"$work/log/other-ca" 2>&1
for name in "${organisations[@]}" stranger; do
  bash "$deploy/make_node_key.sh" "$work/sites/$name/node.key" >>"$work/log/keys" 2>&1
done
# owners tell each other the keys by which their sites make keys that the server cannot read
for name in "${organisations[@]}"; do
  printf '%s %s\n' "$name" "$(python -m tp_flower.command_line site-key --state-dir "$work/sites/$name/state")"
done >"$work/keys.txt"
cp "$work/sites/directory/tables.toml" "$work/sites/directory/airports.csv" "$work/sites/stranger"

say "the app that all owners have reviewed"
bash "$deploy/app_hash.sh" | tee "$work/apps.txt"

say "the SuperLink on port $port, and before it the front on port $front"
start superlink bash "$deploy/superlink.sh" --certificates "$work/ca" --state "$work/link" --port "$port" \
  --sessions "$work/run"
mkdir "$work/front"
sed -e "s|127.0.0.1:8000|127.0.0.1:$port|" -e "s|listen 8443|listen 127.0.0.1:$front|" \
  -e "s|/etc/tp-flower/ca|$work/ca|" -e "s|/var/lib/tp-flower-front|$work/front|" \
  -e "s|/run/tp-flower|$work/run|" "$deploy/nginx.conf" >"$work/front/nginx.conf"
start front nginx -c "$work/front/nginx.conf" -e stderr \
  -g "daemon off; pid $work/front/pid; user $(id -un) $(id -gn);"
bash "$deploy/connect.sh" demo "127.0.0.1:$port" "$work/ca/ca.crt"
bash "$deploy/connect.sh" from-outside "127.0.0.1:$front" "$work/ca/ca.crt"
wait_until 60 "the SuperLink answers" superlink flwr supernode list demo
wait_until 10 "the front answers" front openssl s_client -connect "127.0.0.1:$front" -CAfile "$work/ca/ca.crt" \
  -verify_return_error -brief

say "what may not come in"
if flwr supernode list from-outside >"$work/log/from-outside" 2>&1; then
  fail "the operator's API can be reached through the front"
fi
printf '  the operator, through the front: rejected\n'
rejected "a SuperNode that is not registered" "Failed to activate SuperNode" stranger
bash "$deploy/register.sh" demo "$work/sites/directory/node.key.pub" directory
rejected "a SuperNode with another CA" "CERTIFICATE_VERIFY_FAILED" directory "$work/other-ca/ca.crt"

say "five SuperNodes"
for name in EWR JFK LGA registry; do
  bash "$deploy/register.sh" demo "$work/sites/$name/node.key.pub" "$name"
done
read -r -a ports <<<"$node_ports"
for index in "${!organisations[@]}"; do
  supernode "${organisations[index]}" "${ports[index]}"
  start "site-${organisations[index]}" "${command[@]}"
done
wait_until 60 "five SuperNodes are online" superlink online 5
flwr supernode list demo

say "an app that no owner has listed"
mkdir "$work/other"
cp -r pyproject.toml LICENSE tp_flower strategies client_apps "$work/other"
printf '\n' >>"$work/other/client_apps/app.py"
printf 'min-sites = 5\n' >"$work/other.toml"
if (run_app other "$work/other.toml" "$work/other") >"$work/log/refused" 2>&1; then
  fail "an app that no owner has listed was run"
fi
grep -om 1 "the site's owner has not allowed the app bundle with SHA-256 [0-9a-f]*" "$work/log/refused" ||
  fail_with_log refused "an app that no owner has listed failed for another reason"

say "training over the five organisations"
# of the airports' six columns scores may leave three times, in all runs: two epochs, and predictions
settings=('num-epochs = 2' 'model-name = "flights"' "sql = \"\"\"$sql\"\"\"")
sites=('min-sites = 5' 'site-timeout = 120' "channel = \"$channel\"")
printf '%s\n' "${settings[@]}" "${sites[@]}" >"$work/train.toml"
approved_run train "$work/train.toml"
trained=$results
python - "$trained/report.json" <<'PYTHON'
import json
import sys

report = json.load(open(sys.argv[1]))
rounds = [item for item in report["history"] if item["epoch"]]
seconds = sum(item[f"{part}-seconds"] for item in rounds for part in ("server", "client", "wait"))
print(f"{len(rounds)} rounds of training took {seconds:.1f} s, {report['seconds']:.1f} s in all")
PYTHON

say "predictions by the model that it has left at the organisations"
printf '%s\n' 'mode = "predict"' 'model-name = "flights"' 'row-key = "f.flight, f.time_hour"' "${sites[@]}" \
  >"$work/predict.toml"
approved_run predict "$work/predict.toml"
python - "$trained/report.json" "$results/predictions.parquet" <<'PYTHON'
import json
import sys

import pandas as pd

predictions = pd.read_parquet(sys.argv[2])
print(predictions.head().to_string())
report = json.load(open(sys.argv[1]))
expected = sum(report["joined-rows"].values())
print(f"{len(predictions):,} predictions")
if len(predictions) != expected:
    sys.exit(f"error: {expected:,} joined rows were trained and tested on")
PYTHON

say "boosted trees in 6 rounds, from the scores of that model, for which the owners lift the rank rule"
for name in "${organisations[@]}"; do
  sed -i 's/^approved-runs = /scores-per-rank = "any"\n&/' "$work/sites/$name/tables.toml"
done
printf '%s\n' 'strategy = "boost"' 'num-epochs = 6' 'model-name = "trees"' 'boost-from = "flights"' \
  "sql = \"\"\"$sql\"\"\"" "${sites[@]}" >"$work/boost.toml"
approved_run boost "$work/boost.toml"
python - "$trained/report.json" "$results/report.json" <<'PYTHON'
import json
import sys

linear, trees = (json.load(open(path))["final"]["test"]["rmse"] for path in sys.argv[1:])
print(f"test RMSE of the linear model {linear:.2f}, of the trees from it {trees:.2f}")
if trees > 0.95 * linear:
    sys.exit("error: the trees have learned too little")
PYTHON

say "least squares from second moments, for which the owners allow these, and no number of a row leaves"
for name in "${organisations[@]}"; do
  sed -i 's/^approved-runs = /releases.moments = "clear"\n&/' "$work/sites/$name/tables.toml"
done
# a column each: min-count refuses indicators of an airport's few rows
numbers="f.distance, f.sched_arr_time, p.seats, w.temp, w.dewp, w.humid, w.wind_speed, w.pressure, w.visib, a.lat, a.lon,
  a.alt"
encoders=$(sed 's/,/=standard;/g' <<<"$numbers" | tr -d '\n')
printf '%s\n' 'strategy = "moments"' 'model-name = "squares"' "encoders = \"$encoders=standard\"" \
  "sql = \"\"\"SELECT f.arr_delay AS label, $numbers ${sql#*a.tzone}\"\"\"" "${sites[@]}" >"$work/moments.toml"
approved_run moments "$work/moments.toml"
python - "$results/report.json" <<'PYTHON'
import json
import sys

report = json.load(open(sys.argv[1]))
squares, mean = (report[entry]["test"]["rmse"] for entry in ("final", "baseline"))
print(f"test RMSE from second moments {squares:.2f}, of the mean {mean:.2f}")
if squares > 0.98 * mean:
    sys.exit("error: the model has learned too little")
PYTHON

say "the same settings and policies in the simulation"
export PLANES_URI=$planes_uri WEATHER_URI=$weather_uri
write_policies "$work/data/tables.toml" flights weather planes airports
printf '%s\n' "${settings[@]}" "tables = \"$work/data/tables.toml\"" >"$work/simulate.toml"
follow python -m tp_flower.command_line train "$work/simulate.toml" --set output-dir="$work/simulated" >"$work/log/simulation" 2>&1 ||
  fail_with_log simulation "the simulation failed"
say "metrics of the deployment, and of the simulation"
python - "$trained/report.json" "$work/simulated/report.json" <<'PYTHON'
import json
import sys

import pandas as pd

reports = [json.load(open(path)) for path in sys.argv[1:]]
first, second = (
    pd.json_normalize([*report["history"], report["final"]]).filter(regex="^(train|test)[.]")
    for report in reports
)
print(pd.DataFrame({"deployment": first.iloc[-1], "simulation": second.iloc[-1]}).to_string())
furthest = (first - second).abs().max().max()
print(f"{first.count().sum()} metrics, furthest apart: {furthest:.1e}")
# a metric that one of them lacks is not equal, nor is one that is no number at the end
if not (furthest <= 1e-6 and first.isna().equals(second.isna()) and first.iloc[-1].notna().all()):
    sys.exit("error: the deployment and the simulation differ")
PYTHON

say "done in $SECONDS seconds${keep:+; reports and logs are in $keep}"
