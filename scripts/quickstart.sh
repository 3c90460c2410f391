#!/usr/bin/env bash
# Train a linear model and boosted trees over the four tables of the built-in flights federation
# (five organisations), and compare with training on the joined table: on rows held out at random, and
# on whole days. With arguments one run of theirs. Makes .venv first if it is missing.
#   bash scripts/quickstart.sh [arguments of flwr run]
#   bash scripts/quickstart.sh -c 'strategy="sgd"'
#   bash scripts/quickstart.sh -c /abs/my-run.toml --federation-config "num-supernodes=2 client-resources-num-cpus=1"
# Exits non-zero if the run failed or the comparison did.
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_environment

note=$(mktemp)
trap 'rm -f "$note"' EXIT

# train ARGUMENTS...: run, and add the folder of its report to the list
runs=()
train() {
  "$venv/bin/python" "$root/scripts/run_app.py" --note-output "$note" "$@"
  [ -s "$note" ] || fail "the run completed but named no report"
  runs+=("$(cat "$note")")
}

say "training"
train "$@"
if [ $# -eq 0 ]; then
  days='test-split="group(f.month, f.day)"'
  say "boosted trees"
  train -c 'strategy="boost" model-name="trees"'
  say "the same, tested on whole days that were held out"
  train -c "$days model-name=\"linear-days\""
  train -c "$days validation-fraction=0.1 patience=2 strategy=\"boost\" model-name=\"trees-days\""
fi

say "the same on the joined table"
"$venv/bin/python" "$root/scripts/compare_centralized.py" "${runs[@]}"
