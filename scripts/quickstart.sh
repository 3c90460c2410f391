#!/usr/bin/env bash
# Train over the four tables of the built-in flights federation (five organisations) and
# compare with training on the joined table. Makes .venv first if it is missing.
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

say "training"
"$venv/bin/python" "$root/scripts/run_app.py" --note-output "$note" "$@"
output_dir=$(cat "$note")
[ -n "$output_dir" ] || fail "the run completed but named no report"

say "the same on the joined table"
"$venv/bin/python" "$root/scripts/compare_centralized.py" "$output_dir"
