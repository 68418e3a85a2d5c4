# Functions shared by demo.sh and test.sh: a virtual environment with Pagefleet in it. Source it after `set -euo pipefail`.
#
#   setup_env [EXTRA]   makes or refreshes the environment, installing the named extra of pyproject.toml;
#                       sets ENV_PYTHON to its interpreter. Does nothing when the last run installed the same things.
#
# Environment: PAGEFLEET_VENV         where it is (default: .venv in the repository root)
#              PAGEFLEET_PYTHON       which interpreter makes it (default: the first of at least 3.10 on PATH)
#              PAGEFLEET_TORCH_INDEX  package index that PyTorch is taken from (default: pip's own settings; where those
#                                     give a CUDA build and there is no GPU, PyTorch's index of CPU wheels)

TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${PAGEFLEET_VENV:-$ROOT/.venv}
ENV_PYTHON=$VENV/bin/python
# threads that spin long at barriers starve each other when something else uses a core (see runtime/startup.py)
[[ -n ${OMP_WAIT_POLICY:-} ]] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '\n== %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n ${PAGEFLEET_PYTHON:-} ]]; then
        is_new_enough "$PAGEFLEET_PYTHON" || die "PAGEFLEET_PYTHON=$PAGEFLEET_PYTHON: expected a Python of at least 3.10"
        echo "$PAGEFLEET_PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python of at least 3.10 on PATH; install one, or name it: PAGEFLEET_PYTHON=/path/to/python3 bash ${0##*/}"
}

make_venv() {
    local python
    if [[ -x $ENV_PYTHON ]] && "$ENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        is_new_enough "$ENV_PYTHON" || die "$VENV holds a Python older than 3.10; remove the folder and run again"
        return
    fi
    if [[ -e $VENV && ! -e $VENV/pyvenv.cfg && -n $(ls -A "$VENV") ]]; then
        die "$VENV exists and is no virtual environment; move it, or set PAGEFLEET_VENV to another folder"
    fi
    python=$(find_python) || exit 1
    say "making a virtual environment in $VENV with $python"
    # a system Python may refuse to install into itself (PEP 668) and may come without ensurepip: the environment
    # solves the first, and the second is named here, before anything is made
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module; install it (on Debian and Ubuntu: apt-get install python3-venv), then run again"
    "$python" -m venv --clear "$VENV" || die "$python could not make a virtual environment in $VENV (message above)"
}

# Everything that decides what gets installed, as one hash.
environment_key() {
    "$ENV_PYTHON" - "$ROOT" "$TORCH_VERSION" "$1" <<'PY'
import hashlib, pathlib, sys

root, torch_version, extra = sys.argv[1:]
key = hashlib.sha256(repr((root, torch_version, extra, sys.version)).encode())
for path in sorted([pathlib.Path(root, "pyproject.toml"), *pathlib.Path(root, "kernels").glob("**/csrc/*")]):
    key.update(path.read_bytes())
print(key.hexdigest())
PY
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# Asks pip, with these further arguments, which build of PyTorch it would take; nothing is fetched.
ask_for_torch() {
    "$ENV_PYTHON" -m pip install -qq --dry-run --ignore-installed --no-deps --report "$VENV/torch-report.json" \
        "torch==$TORCH_VERSION" "$@" >/dev/null
}

# Whether that build carries CUDA and needs gigabytes of vendor libraries, of no use without a GPU. PyPI's does on Linux.
is_cuda_build() {
    "$ENV_PYTHON" - "$VENV/torch-report.json" <<'PY'
import json, sys

torch = json.load(open(sys.argv[1]))["install"][0]["metadata"]
needs = [need for need in torch.get("requires_dist", []) if need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need]
sys.exit(not (needs and "+cpu" not in torch["version"] and sys.platform == "linux"))
PY
}

# Sets torch_source, pip's arguments that say where PyTorch comes from.
choose_torch_source() {
    local index=${PAGEFLEET_TORCH_INDEX:-}
    torch_source=(${index:+--index-url "$index"})
    has_gpu && return
    ask_for_torch ${index:+--index-url "$index"} ||
        die "pip found no torch==$TORCH_VERSION for $("$ENV_PYTHON" --version); see its message above"
    is_cuda_build || return 0
    if [[ -z $index ]]; then
        say "no GPU here: asking PyTorch's index of CPU wheels, $CPU_INDEX"
        torch_source=(--index-url "$CPU_INDEX")
        ask_for_torch "${torch_source[@]}" --retries 1 --timeout 20 && ! is_cuda_build && return
    fi
    die "pip would take a CUDA build of torch $TORCH_VERSION (gigabytes of vendor libraries), there is no GPU here, and no" \
        "CPU build was found at ${index:-$CPU_INDEX}; set PAGEFLEET_TORCH_INDEX to an index of CPU wheels and run again"
}

install_torch() {
    local torch_source
    if "$ENV_PYTHON" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
        return
    fi
    choose_torch_source
    say "installing PyTorch $TORCH_VERSION (a minute or more)"
    "$ENV_PYTHON" -m pip install -qq --no-compile "torch==$TORCH_VERSION" ${torch_source[@]+"${torch_source[@]}"} ||
        die "PyTorch could not be installed (pip's message is above)"
}

setup_env() {
    local extra=${1:-} key stamp
    make_venv
    stamp=$VENV/.pagefleet-installed${extra:+-$extra}
    key=$(environment_key "$extra")
    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
        return
    fi
    install_torch
    say "installing Pagefleet${extra:+ and what its '$extra' extra needs}"
    "$ENV_PYTHON" -m pip install -qq --no-compile --editable "$ROOT${extra:+[$extra]}" "torch==$TORCH_VERSION" ||
        die "Pagefleet could not be installed (pip's message is above)"
    echo "$key" >"$stamp"
}
