#!/usr/bin/env bash
# Build the wheel and the sdist, install each into an empty folder, and train outside the checkout.
# Libraries are those of the environment, which is made first if it is missing; the checkout is on no path.
#   bash scripts/checks/package.sh
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
ensure_environment

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check)
libraries=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

say "wheel and sdist"
"${pip[@]}" install --constraint "$root/constraints.txt" --target "$work/tools" hatchling
(cd "$root" && PYTHONPATH="$work/tools" "$venv/bin/python" -m hatchling build --directory "$work/dist" >&2)
mkdir "$work/unpacked"
tar -xzf "$work"/dist/*.tar.gz --strip-components=1 -C "$work/unpacked"
(cd "$work/unpacked" && PYTHONPATH="$work/tools" "$venv/bin/python" -m hatchling build -t wheel --directory "$work/again" >&2)
cmp "$work"/dist/*.whl "$work"/again/*.whl || fail "the sdist makes another wheel than the checkout"
"${pip[@]}" install --no-deps --no-index --target "$work/site" "$work"/dist/*.whl

say "a run outside the checkout"
# an empty environment that sees the installed wheel and the libraries, but no editable install: a .pth counts in
# the folder of an environment alone
"$venv/bin/python" -m venv --without-pip "$work/env"
cp -r "$root/examples/own_tables" "$work/tables"
cd "$work"
export PYTHONPATH="$work/site:$libraries" TP_FLOWER_HOME="$work/home"
"$work/env/bin/python" - "$work/site" <<'PYTHON'
import pathlib, sys
import client_apps, strategies, tp_flower

for package in (client_apps, strategies, tp_flower):
    folder = pathlib.Path(package.__file__).parent
    assert folder.parent == pathlib.Path(sys.argv[1]), f"{folder} is not the installed package"
    assert (folder / "py.typed").exists(), folder
PYTHON
[ -x "$work/site/bin/tp-flower" ] || fail "the wheel brings no command tp-flower"
# what only some runs need is not there: drivers of database servers, LightGBM, and matplotlib
mkdir "$work/without"
printf 'import sys\nsys.modules |= dict.fromkeys(("psycopg", "pymysql", "lightgbm", "matplotlib"))\n' >"$work/without/sitecustomize.py"
export PYTHONPATH="$work/without:$PYTHONPATH"
"$work/env/bin/python" tables/make_database.py
"$work/env/bin/python" -m tp_flower.command_line train tables/my-run.toml --set "output-dir=$work/report"
[ -s "$work/report/report.html" ] || fail "the run wrote no report"
say "the packages work outside the checkout"
