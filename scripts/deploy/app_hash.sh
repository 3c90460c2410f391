#!/usr/bin/env bash
# Print the SHA-256 of the app bundle that `flwr run` makes of a checkout: what a data owner lists
# in the file of `supernode.sh --allowed-apps`. Nothing is written, and no code of the app is run.
#   bash scripts/deploy/app_hash.sh [FOLDER]
# FOLDER: the checkout (default: the one of this script). The hash depends on the code in it, its
# pyproject.toml and the version of Flower, and not on when, where and by whom it is computed.
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -le 1 ] || wrong_usage "the checkout's folder is the only argument"
folder=$(absolute "${1:-$root}")
need_file FOLDER "$folder/pyproject.toml"
# a checkout under review must not be imported from
unset PYTHONPATH
use_environment "${FLWR_HOME:-${HOME:-}/.flwr}"
python -I - "$folder" <<'PYTHON'
import hashlib
import sys
from pathlib import Path

from flwr.cli.build import build_fab_from_disk

try:
    bundle = build_fab_from_disk(Path(sys.argv[1]))
except (ValueError, OSError) as error:
    sys.exit(f"error: no app bundle can be made of {sys.argv[1]}: {error}")
print(hashlib.sha256(bundle).hexdigest())
PYTHON
