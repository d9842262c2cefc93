#!/usr/bin/env bash
# Slurm, one torchrun on every host of the job:
#
#     sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh configs/qwen3_30b_a3b.yaml
#
# Submit it from the repository. Two minutes before the time limit Slurm asks the run to stop: it
# saves, ends with 75, and the job goes back into the queue to go on.
#SBATCH --job-name=tessera
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=TERM@120
set -euo pipefail
if [[ $# -eq 0 || "$1" == "--help" ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 0
fi
PYTHON=${PYTHON:-python}
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a host do not meet
asked=0
trap 'asked=1' TERM # the processes of the step get the signal too
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:?}" \
    --max-restarts="${RESTARTS:-3}" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$FIRST:$PORT" train.py "$@" &
code=0
wait $! || code=$?
if [[ $asked -eq 1 ]]; then
    wait || true
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
