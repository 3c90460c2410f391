#!/usr/bin/env bash
# Build docs/ as a site in build/docs, its notebooks executed; open build/docs/index.html, offline too.
# Makes .venv first if it is missing. Warnings are errors, and so is anything that a page would load from elsewhere.
#   bash scripts/docs.sh [FOLDER]
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_environment docs

site=${1:-$root/build/docs}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
say "documentation"
# notebooks leave nothing in the home folder, log nothing, and take one core
env TP_FLOWER_HOME="$work/home" HOME="$work" FLWR_LOG_LEVEL=CRITICAL OMP_NUM_THREADS=1 \
  "$venv/bin/python" -m sphinx --quiet --fail-on-warning --keep-going --fresh-env \
  --conf-dir docs --doctree-dir "$work/doctrees" . "$site"

# links may lead elsewhere; scripts, styles, fonts and pictures may not
if grep -rnoE --include='*.html' --include='*.css' \
  '(<(script|img|iframe|source)[^>]* src=|<link[^>]* href=|url\()["'\'']?(https?:)?//[^"'\'' )>]*' "$site"; then
  fail "the site loads what is listed from elsewhere"
fi
say "the site is in $site"
