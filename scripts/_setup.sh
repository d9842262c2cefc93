# Sourced by quickstart.sh and test.sh: a virtual environment in .venv with this project in it.
#
#   setup_transformers_457 transformers 4.57 in a folder of its own, for tests
#   setup_venv EXTRAS     EXTRAS like "train" or "dev,deepspeed"; sets PY to the environment's Python
#
# PyTorch is the one choice to make, as its builds differ by gigabytes:
#   1. an installed PyTorch of a supported version is kept, in .venv or in the Python below it;
#   2. with an NVIDIA driver: the default build;
#   3. otherwise a CPU build: from the package index if it has one ("+cpu"), else from PyTorch's own.
# Environment: PYTHON (interpreter to use), TESSERA_TORCH (a pip requirement that replaces 2 and 3).

TORCH_RANGE=$(sed -n 's/^ *"torch\(>=[^"]*\)",$/\1/p' "$ROOT/pyproject.toml")
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The newest supported Python on the path, or PYTHON.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.10 or newer is needed; found $(${PYTHON:-python3} --version 2>&1 || true).
       Install one (for example: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python bash $0"
}

# Exit 0 if this Python imports a PyTorch inside TORCH_RANGE.
has_torch() {
    "$1" - "$TORCH_RANGE" 2>/dev/null <<'PY'
import sys
import torch
version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
low, high = (tuple(int(x) for x in part.lstrip("<>=").split(".")[:2]) for part in sys.argv[1].split(","))
sys.exit(not low <= version < high)
PY
}

# Version of a CPU build inside TORCH_RANGE that the configured package index offers, or nothing.
cpu_build_on_index() {
    "$PY" -m pip index versions torch 2>/dev/null | "$PY" -c '
import re, sys
low, high = (tuple(int(x) for x in re.findall(r"\d+", part)[:2]) for part in sys.argv[1].split(","))
for version in re.findall(r"\d+\.\d+\.\d+\+cpu", sys.stdin.read()):
    if low <= tuple(int(x) for x in version.split(".")[:2]) < high:
        print(version)
        break
' "$TORCH_RANGE" || true
}

install_torch() {
    local pip=("$PY" -m pip install -qq --disable-pip-version-check) cpu
    if [ -n "${TESSERA_TORCH:-}" ]; then
        say "installing $TESSERA_TORCH"
        "${pip[@]}" "$TESSERA_TORCH" || die "pip could not install TESSERA_TORCH=$TESSERA_TORCH"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
        say "installing PyTorch for the NVIDIA GPU found here (some gigabytes)"
        "${pip[@]}" "torch$TORCH_RANGE" || die "pip could not install torch$TORCH_RANGE"
    elif [ "$(uname -s)" = Darwin ]; then
        say "installing PyTorch"
        "${pip[@]}" "torch$TORCH_RANGE" || die "pip could not install torch$TORCH_RANGE"
    elif cpu=$(cpu_build_on_index) && [ -n "$cpu" ]; then
        say "installing PyTorch $cpu"
        "${pip[@]}" "torch==$cpu" || die "pip could not install torch==$cpu"
    else
        say "installing PyTorch for the CPU from $CPU_INDEX"
        "${pip[@]}" --timeout 20 --retries 1 --index-url "$CPU_INDEX" "torch$TORCH_RANGE" ||
            die "no CPU build of PyTorch could be had from $CPU_INDEX.
       Take the default build (larger, also runs on a CPU): TESSERA_TORCH='torch$TORCH_RANGE' bash $0"
    fi
}

setup_venv() {
    local extras=$1 base stamp site=()
    [ -n "$TORCH_RANGE" ] || die "no torch requirement found in pyproject.toml"
    PY=$ROOT/.venv/bin/python
    if [ -e "$ROOT/.venv" ] && ! "$PY" -c 'import pip' 2>/dev/null; then
        die "$ROOT/.venv exists but does not work (moved, or its Python is gone); remove it: rm -r $ROOT/.venv"
    fi
    if [ ! -e "$ROOT/.venv" ]; then
        base=$(find_python)
        if has_torch "$base"; then
            say "keeping the PyTorch of $base"
            site=(--system-site-packages)
        fi
        "$base" -m venv ${site[@]+"${site[@]}"} "$ROOT/.venv" 2>/dev/null || {
            rm -rf "$ROOT/.venv"
            die "$base cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
        }
    fi
    stamp=$ROOT/.venv/.tessera-$(cksum <"$ROOT/pyproject.toml" | tr ' ' '-')-$extras
    [ -e "$stamp" ] && return
    has_torch "$PY" || install_torch
    # The PyTorch that is there now must stay: another package must not replace it.
    "$PY" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$ROOT/.venv/torch.pin"
    say "installing Tessera and what it needs"
    "$PY" -m pip install -qq --disable-pip-version-check -c "$ROOT/.venv/torch.pin" \
        -e "$ROOT[$extras]" || die "pip could not install the project; its message stands above"
    touch "$stamp"
}

# transformers 4.57 beside the installed one, for the tests that compare both; sets TESSERA_TRANSFORMERS_457.
setup_transformers_457() {
    export TESSERA_TRANSFORMERS_457=$ROOT/.venv/transformers-4.57
    local stamp=$TESSERA_TRANSFORMERS_457/.done
    [ -e "$stamp" ] && return
    say "installing transformers 4.57 for comparison"
    rm -rf "$TESSERA_TRANSFORMERS_457" && mkdir -p "$TESSERA_TRANSFORMERS_457"
    # What it pins otherwise than 5.x; the rest is the environment's.
    "$PY" -m pip install -qq --disable-pip-version-check --no-deps --target "$TESSERA_TRANSFORMERS_457" \
        "transformers==4.57.6" "huggingface_hub==0.36.2" "tokenizers==0.22.2" ||
        die "pip could not install transformers 4.57.6; its message stands above"
    touch "$stamp"
}
