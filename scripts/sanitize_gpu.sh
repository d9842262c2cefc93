#!/usr/bin/env bash
# The GPU tests of small shapes under compute-sanitizer's memcheck: no kernel may touch memory that
# was not allocated for it.
#
#   bash scripts/sanitize_gpu.sh [--help] [PYTEST ARGUMENTS …]
#
# Each tensor gets an allocation of its own (no caching allocator), so that a read past its end is
# seen. Without arguments: experts on Triton and on Hopper kernels, router, sparse products. PYTHON
# names the interpreter. Exit code 0: no error; 3: compute-sanitizer (of the CUDA toolkit) is missing.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$ROOT"

tool=$(command -v compute-sanitizer || true)
for found in /usr/local/cuda*/bin/compute-sanitizer; do
    if [ -z "$tool" ] && [ -x "$found" ]; then tool=$found; fi
done
if [ -z "$tool" ]; then
    echo "compute-sanitizer is not on PATH nor under /usr/local/cuda*/bin; it is part of the CUDA toolkit" >&2
    exit 3
fi

if [ $# -eq 0 ]; then
    small="numbers_of_tokens and not 819 or widths or empty or no_expert or ragged"
    small+=" or float8 or poisoned or left_alone or no_tokens or metadata or csr_and_csc"
    set -- tests/gpu/test_hopper.py tests/gpu/test_experts_gpu.py tests/gpu/test_router_gpu.py \
        tests/gpu/test_sparse.py -k "$small"
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 TESSERA_TUNE="${TESSERA_TUNE:-0}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
"$tool" --tool memcheck --error-exitcode 9 "${PYTHON:-python}" -m pytest -q -p no:cacheprovider "$@"
