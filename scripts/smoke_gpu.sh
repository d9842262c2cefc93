#!/usr/bin/env bash
# The README's commands on this machine's GPU, each in a process of its own, in about four minutes.
#
#   bash scripts/smoke_gpu.sh [--help] [--list] [--only REGEX] [--keep FOLDER]
#
# Trains, kills and resumes, stops, exports, imports, samples, verifies and estimates, and compares
# what must be equal, and the memory of three configs with its estimate (on 130 GiB or more). Without a
# GPU it runs what a CPU can and names the rest. The last line says passed or not, with commit, card,
# torch and triton. --only runs the chains whose name matches; --keep leaves
# runs and logs in FOLDER. PYTHON names the interpreter (else .venv's, else python3).
# Exit code 0: passed; 1: something failed; 2: a mistake in the arguments.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" "$ROOT/scripts/_smoke.py" "$@"
