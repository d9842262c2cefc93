#!/usr/bin/env bash
# All GPUs of this host:
#
#     bash scripts/launch/one_host.sh configs/olmoe_1b_7b.yaml train.steps=100
#
# GPUS=4 takes fewer; without a GPU it is the number of processes on the CPU. A process that is killed
# or lost ends the run; it starts again, up to RESTARTS times (3), from the last good checkpoint.
# Ctrl+C saves and ends with 75; the same command resumes. The exit code is the run's.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $# -eq 0 || "$1" == "--help" ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
fi
PYTHON=${PYTHON:-python}
GPUS=${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
if [[ "$GPUS" == 0 ]]; then
    echo "one_host.sh: PyTorch sees no GPU here; GPUS=2 starts two CPU processes" >&2
    exit 2
fi
exec "$PYTHON" scripts/launch/launch.py --processes "$GPUS" --restarts "${RESTARTS:-3}" -- "$@"
