#!/usr/bin/env bash
# Train a linear model and boosted trees over the four tables of the built-in flights federation
# (five organisations), and compare with training on the joined table: on rows held out at random, and
# on whole days. With arguments one run of theirs. Makes .venv first if it is missing.
#   bash scripts/quickstart.sh [arguments of tp-flower train]
#   bash scripts/quickstart.sh --set strategy=sgd
#   bash scripts/quickstart.sh my-run.toml --flower
# Exits non-zero if the run failed or the comparison did.
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_environment

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# train ARGUMENTS...: run, and add the folder of its report to the list
runs=()
train() {
  "$venv/bin/tp-flower" train "$@" | tee "$log"
  runs+=("$(sed -n 's/^Report: \(.*\)\/report.json$/\1/p' "$log")")
}

say "training"
train "$@"
if [ $# -eq 0 ]; then
  days='test-split=group(f.month, f.day)'
  say "boosted trees"
  train --set strategy=boost --set model-name=trees
  say "the same, tested on whole days that were held out"
  train --set "$days" --set model-name=linear-days
  train --set "$days" --set validation-fraction=0.1 --set patience=2 --set strategy=boost --set model-name=trees-days
fi

say "the same on the joined table"
"$venv/bin/python" "$root/scripts/compare_centralized.py" "${runs[@]}"
