#!/usr/bin/env bash
# One of several hosts; the same command on each, with the first one's address and a file system that
# all of them see:
#
#     HOSTS=2 FIRST=10.0.0.1 bash scripts/launch/hosts.sh configs/qwen3_30b_a3b.yaml
#
# Hosts are the nodes of the mesh unless parallel.nodes says otherwise. GPUS=4 takes fewer of each
# host, PORT another port than 29500, RESTARTS another number of restarts than 3. Where a host has
# several networks, name the one to use: NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0. Stop one
# host (Ctrl+C) and all save and end with 75. The exit code is the run's. HOSTS=1:4 trains with as
# many of four hosts as are there, and goes on without one that is lost (docs/parallel.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $# -eq 0 || "$1" == "--help" ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 0
fi
PYTHON=${PYTHON:-python}
GPUS=${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
if [[ "$GPUS" == 0 ]]; then
    echo "hosts.sh: PyTorch sees no GPU here; GPUS=2 starts two CPU processes" >&2
    exit 2
fi
exec "$PYTHON" scripts/launch/launch.py --processes "$GPUS" --restarts "${RESTARTS:-3}" \
    --hosts "${HOSTS:?number of hosts}" --id "${RUN_ID:-tessera}" \
    --first "${FIRST:?address of the first host}:${PORT:-29500}" -- "$@"
