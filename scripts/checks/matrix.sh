#!/usr/bin/env bash
# Run the fast tests with every supported Python, and with the lowest and the highest dependencies.
#   bash scripts/checks/matrix.sh [VERSION...]      default: 3.11 3.12 3.13 lowest highest
# `lowest` and `highest` use the first Python of scripts/lib.sh. torch stays at the version of
# constraints.txt in all but the highest, because its other builds are several gigabytes.
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Print the lower bound of each dependency as a constraint.
lowest_constraints() {
  "$1" - "$root/pyproject.toml" <<'PYTHON'
import re, sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for line in project["dependencies"] + extras["postgresql"] + extras["mysql"] + extras["boost"]:
    bound = re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", line)
    if bound and bound[1] != "torch":
        print(f"{bound[1]}=={bound[2]}")
PYTHON
  grep '^torch==' "$root/constraints.txt"
}

# try NAME PYTHON CONSTRAINTS: install into an environment of its own, and run the fast tests.
try() {
  local name=$1 python=$2 constraints=$3
  say "$name: $("$python" --version)"
  "$python" -m venv "$work/$name"
  "$work/$name/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint "$constraints" --editable "$root[dev]"
  (cd "$root" && OMP_NUM_THREADS=1 "$work/$name/bin/python" -m pytest -q -n 2 -p no:cacheprovider \
    -m "not slow" tests/unit) 2>&1 | tail -n 5
}

if [ $# = 0 ]; then
  set -- 3.11 3.12 3.13 lowest highest
fi
failed=()
for version in "$@"; do
  python=$(find_python)
  constraints=$root/constraints.txt
  case $version in
    lowest)
      constraints=$work/lowest.txt
      lowest_constraints "$python" >"$constraints"
      ;;
    highest) constraints=/dev/null ;;
    *) python=python$version ;;
  esac
  try "$version" "$python" "$constraints" || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || fail "failed: ${failed[*]}"
