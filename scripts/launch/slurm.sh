#!/usr/bin/env bash
# Slurm, one launcher on every host of the job:
#
#     sbatch --nodes=4 --gpus-per-node=8 scripts/launch/slurm.sh configs/qwen3_30b_a3b.yaml
#
# Submit it from the repository. Five minutes before the time limit (for larger checkpoints:
# sbatch --signal=B:USR1@900) the run is asked to stop: it saves, ends with 75, and the job goes back
# into the queue to resume. A job that ends with another code, or by scancel, does not.
#SBATCH --job-name=tessera
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:USR1@300
set -euo pipefail
if [[ $# -eq 0 || "$1" == "--help" ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
fi
PYTHON=${PYTHON:-python}
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a host do not meet
LAUNCHER=$(mktemp -u "${TMPDIR:-/tmp}/tessera-$SLURM_JOB_ID-XXXXXX.pid")

# B: sends the signal to this shell alone. It is passed on to the launcher of this host, the first of
# the job; all hosts then stop together. Not through Slurm: srun answers SIGTERM by killing its tasks,
# a step that Slurm signals loses its exit code, and processes that wait for no signal would die of it.
asked=0
ask() {
    asked=1
    kill -TERM "$(cat "$LAUNCHER")" || echo "slurm.sh: the run has not started yet" >&2
}
trap ask USR1
# A host that ends must not take down others that still save: they end by themselves.
srun --kill-on-bad-exit=0 "$PYTHON" scripts/launch/launch.py \
    --processes "${SLURM_GPUS_ON_NODE:?}" --restarts "${RESTARTS:-3}" --hosts "$SLURM_NNODES" \
    --id "$SLURM_JOB_ID" --first "$FIRST:$PORT" --pid-file "$LAUNCHER" -- "$@" &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended the wait, not the step
    code=0
    wait "$step" || code=$?
done
rm -f "$LAUNCHER"
if [[ $asked -eq 1 && $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
