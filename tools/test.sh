#!/usr/bin/env bash
# From nothing: environment, test models, lint, format, types, import contracts, tests. Stops at the first that fails.
#
#   bash tools/test.sh [pytest arguments]     for example: bash tools/test.sh tests/unit -k sampler
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

step() {
    local name=$1 began=$SECONDS
    shift
    say "$name"
    "$@" || die "$name failed (exit code $?): $*"
    printf -- '-- %s: %s s\n' "$name" "$((SECONDS - began))" >&2
}

cores() { "$ENV_PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)'; }

step environment setup_env dev
step models "$ENV_PYTHON" tools/fetch_models.py all

bin=$VENV/bin
# small tensors gain nothing from many threads, and a machine's cores may be shared
threads=$(cores)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads < 4 ? threads : 4))}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

step lint "$bin/ruff" check .
step format "$bin/ruff" format --check .
# checkers of source cannot follow an editable install; .dev/pagefleet has the same layout as symlinks
step types env MYPYPATH="$ROOT/.dev" "$ENV_PYTHON" -m mypy -p pagefleet.runtime -p pagefleet.backends
step imports "$bin/lint-imports"
step tests "$ENV_PYTHON" -m pytest "$@"
