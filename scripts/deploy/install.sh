#!/usr/bin/env bash
# Make the environment that SuperLink, SuperNode and flwr run in: .venv, or $TP_FLOWER_VENV.
# Run it once, and again after an update of the project.
#   bash scripts/deploy/install.sh
set -euo pipefail

# shellcheck source=scripts/deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -eq 0 ] || wrong_usage "it takes no arguments"
# shellcheck disable=SC2119 # without the tools of tests
ensure_environment
say "the environment is in $venv: $("$venv/bin/flwr" --version)"
