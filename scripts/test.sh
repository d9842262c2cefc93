#!/usr/bin/env bash
# Fresh machine to test results: makes .venv, installs, and runs every test that this machine can run.
#
#   bash scripts/test.sh [--help] [PYTEST ARGUMENTS …]
#
# Without arguments: lint and format check, then the whole suite: kernels in Triton's interpreter and
# ahead-of-time compilation on a CPU, everything incl. tests/gpu where there is a GPU. With arguments
# they are given to pytest in place of "tests" (and nothing is linted). Ends with a summary; exit code 0 only if all is well.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$ROOT"
. scripts/_setup.sh

start=$SECONDS
extras=dev
if [ "$(uname -s)" = Linux ]; then extras+=,deepspeed; fi # a source package; elsewhere its tests are skipped
if [ "$(uname -sm)" = "Linux x86_64" ]; then extras+=,interop; fi # other engines; elsewhere skipped
setup_venv "$extras"
setup_transformers_457
installed=$((SECONDS - start))
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline HF_HUB_OFFLINE=1
export HF_HUB_DISABLE_TELEMETRY=1 WANDB_SILENT=true

if [ $# -gt 0 ]; then
    exec "$PY" -m pytest "$@"
fi

failed=()
step() { # NAME COMMAND…
    local name=$1 begin=$SECONDS; shift
    say "$name"
    if "$@"; then printf '   %s: ok, %s s\n' "$name" $((SECONDS - begin)); else failed+=("$name"); fi
}
step "lint" "$PY" -m ruff check .
step "format" "$PY" -m ruff format --check .
if "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # One process: tests of one GPU's memory and speed must not share it.
    step "tests" "$PY" -m pytest tests -q --durations=10
else
    # loadfile keeps a file's tests in one worker, where they share compiled kernels and trained models.
    step "tests" "$PY" -m pytest tests -q -n 2 --dist loadfile --durations=10
fi
printf '\ninstalling took %s s, everything %s s\n' "$installed" $((SECONDS - start))
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[*]}"
    exit 1
fi
echo "all is well"
