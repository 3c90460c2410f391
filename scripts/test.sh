#!/usr/bin/env bash
# Run all tests, the slow ones included; makes .venv first if it is missing.
#   bash scripts/test.sh [pytest arguments]        e.g. -k mapping, or -m "not slow"; --whole runs all parameters
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_environment dev

cd "$root"
say "tests"
# four tests at a time, as some wait; those of a file one after the other: they share what they make;
# the files that take longest first (tests/conftest.py), so that all end together;
# a thread for each of them: more would take turns on the cores;
# an empty -m undoes the "not slow" of pyproject.toml; a later -m of the caller wins
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "" "$@"
