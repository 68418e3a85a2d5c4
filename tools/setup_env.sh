# Functions shared by demo.sh and test.sh: a virtual environment with Pagefleet in it. Source it after `set -euo pipefail`.
#
#   setup_env [EXTRA]   makes or refreshes the environment, installing the named extra of pyproject.toml;
#                       sets ENV_PYTHON to its interpreter. Does nothing when the last run installed the same things.
#
# Environment: PAGEFLEET_VENV         where it is (default: .venv in the repository root)
#              PAGEFLEET_PYTHON       which interpreter makes it (default: the first of at least 3.10 on PATH)
#              PAGEFLEET_TORCH_INDEX  package index that PyTorch is taken from (default: pip's own settings)

TORCH_VERSION=2.13.0
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${PAGEFLEET_VENV:-$ROOT/.venv}
ENV_PYTHON=$VENV/bin/python
# threads that spin at barriers starve each other when something else uses a core
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
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

# The build of PyTorch that pip would take, without fetching it. PyPI's build for Linux on x86 carries CUDA and needs
# gigabytes of vendor libraries, of no use without a GPU.
refuse_cuda_build() {
    local report=$VENV/torch-report.json
    has_gpu && return
    "$ENV_PYTHON" -m pip install -qq --dry-run --ignore-installed --no-deps --report "$report" "$@" >/dev/null ||
        die "pip found no torch==$TORCH_VERSION for $("$ENV_PYTHON" --version); see its message above"
    "$ENV_PYTHON" - "$report" <<'PY' || exit 1
import json, sys

torch = json.load(open(sys.argv[1]))["install"][0]["metadata"]
needs = [need for need in torch.get("requires_dist", []) if need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need]
if needs and "+cpu" not in torch["version"] and sys.platform == "linux":
    sys.exit(
        f"error: pip would take a CUDA build of torch {torch['version']} ({len(needs)} vendor libraries), and there is no "
        "GPU here; set PAGEFLEET_TORCH_INDEX to PyTorch's index of CPU wheels (its install page, choice 'CPU', shows "
        "the address) and run again"
    )
PY
}

install_torch() {
    local wanted=("torch==$TORCH_VERSION")
    [[ -n ${PAGEFLEET_TORCH_INDEX:-} ]] && wanted+=(--index-url "$PAGEFLEET_TORCH_INDEX")
    if "$ENV_PYTHON" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
        return
    fi
    refuse_cuda_build "${wanted[@]}"
    say "installing PyTorch $TORCH_VERSION (a minute or more)"
    "$ENV_PYTHON" -m pip install -qq --no-compile "${wanted[@]}" || die "PyTorch could not be installed (pip's message is above)"
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
