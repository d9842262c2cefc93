#!/usr/bin/env bash
# Fresh machine to trained model: makes .venv, installs, trains a small Mixture-of-Experts model on the
# bundled text, exports it for Hugging Face, writes some text with it, and makes a report.
#
#   bash scripts/quickstart.sh [--help] [section.key=value …]
#
# Runs on a CPU (two cores: a few minutes) or a CUDA GPU, and needs no model hub. Words like train.steps=50
# or run.name=try go to train.py. The same command again resumes where the last one ended.
# Environment: PYTHON, TESSERA_TORCH (see scripts/_setup.sh).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$ROOT"
. scripts/_setup.sh

name=quickstart dir=runs
for word in "$@"; do
    case "$word" in
        run.name=*) name=${word#run.name=} ;;
        run.dir=*) dir=${word#run.dir=} ;;
        *=*) ;;
        *) die "'$word' is no override; write section.key=value, for example train.steps=50" ;;
    esac
done
run=$dir/$name

begin=$SECONDS
setup_venv "$(command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && echo gpu || echo train)"
installed=$((SECONDS - begin))

# Nothing here needs a hub, and asking for one that cannot be reached would take long.
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
# Waiting threads sleep instead of spinning: with another program on the same cores, spinning threads
# made a step on two cores fourteen times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

say "training (interrupt with Ctrl+C; the same command resumes)"
code=0
"$PY" train.py configs/quickstart.yaml "$@" || code=$?
case $code in
    0) ;;
    2) die "the config or the data has a mistake: see the line above" ;;
    75) say "stopped; bash scripts/quickstart.sh $* resumes from there"; exit 75 ;;
    *) die "training ended with code $code; $PY scripts/doctor.py $run may tell why" ;;
esac

say "exporting for Hugging Face, and comparing the export with transformers"
"$PY" scripts/export_hf.py "$run/checkpoints/latest" "$run/hf" --overwrite --check

say "a sample"
"$PY" scripts/generate.py "$run/hf" --prompt "The whale" --max-new-tokens 60 --temperature 0.8

say "report"
"$PY" scripts/report.py "$run"

cat <<TXT

Done in $((SECONDS - begin)) s, $installed s of them for installing.

  $run/report.html         curves and findings, one file
  $run/checkpoints/latest  to go on training: bash scripts/quickstart.sh train.steps=2000
  $run/hf                  the model for transformers, vLLM, llama.cpp

Next: your own text     .venv/bin/python train.py configs/quickstart.yaml run.name=mine \\
                          'data.sources=[{path: my_text.txt}]' data.tokenizer=null
      write with it     .venv/bin/python scripts/generate.py $run --prompt "Call me"
      other models      configs/, docs/index.md
TXT
