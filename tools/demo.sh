#!/usr/bin/env bash
# From a fresh machine to a finished batch job: environment, demo model, 64 prompts. Run it again: only the job runs.
#
#   bash tools/demo.sh [pagefleet overrides]     for example: bash tools/demo.sh precision=bf16 scheduler.max_sequences=8
#
# Results go to outputs/demo/results.jsonl ($PAGEFLEET_DEMO_OUTPUT names another file). See setup_env.sh for the environment's variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

started=$SECONDS
output=${PAGEFLEET_DEMO_OUTPUT:-$ROOT/outputs/demo/results.jsonl}

setup_env
"$ENV_PYTHON" "$ROOT/tools/fetch_models.py" smollm2
model=$("$ENV_PYTHON" "$ROOT/tools/fetch_models.py" --where smollm2)

# the finished results of an earlier run (they have a summary beside them) make way; the journal of an interrupted run
# stays, and the job resumes from it unless the overrides have changed
mkdir -p "$(dirname "$output")"
[[ ! -f $output.summary.json ]] || rm -f "$output" "$output.summary.json"

say "running 64 chat prompts, three of them bad on purpose"
code=0
"$VENV/bin/pagefleet" batch model.path="$model" job.input="$ROOT/tools/data/demo_prompts.jsonl" job.output="$output" \
    job.on_mismatch=restart "$@" || code=$?
# 3: some rows are error rows, which is what the three bad ones must become
[[ $code == 0 || $code == 3 ]] || exit "$code"

"$ENV_PYTHON" "$ROOT/tools/show_results.py" "$output"
say "done in $((SECONDS - started)) s; results: $output, summary: $output.summary.json"
