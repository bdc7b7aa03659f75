# shellcheck shell=bash
# Set up the virtual environment of this checkout; to be sourced.
#
#   setup_env EXTRAS      afterwards $ROOT, $VENV, $PY and $GPUS are set
#
# Environment: DS_KFAC_VENV (folder, default .venv in the checkout), DS_KFAC_PYTHON (interpreter),
# DS_KFAC_TORCH (requirement, default torch==2.13.0 without and torch>=2.4 with an NVIDIA GPU).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${DS_KFAC_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"
GPUS="$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)"

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

find_python() {
    local candidate found=""
    for candidate in ${DS_KFAC_PYTHON:+"$DS_KFAC_PYTHON"} \
        python3 python3.13 python3.12 python3.11 python3.14 python; do
        supported_python "$candidate" || continue
        found="$candidate"
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    if [[ -n "$found" ]]; then
        fail "$found cannot create virtual environments (its venv or ensurepip module is" \
            "missing; on Debian and Ubuntu install the package python3-venv)"
    fi
    fail "no Python 3.11 to 3.14 found; install one, or name it in DS_KFAC_PYTHON"
}

create_venv() {
    if supported_python "$PY" && "$PY" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if [[ -e "$VENV" && ! -f "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        fail "$VENV exists and is not a virtual environment; move it away or set DS_KFAC_VENV"
    fi
    local base
    base="$(find_python)"
    echo "creating $VENV with $("$base" --version)"
    "$base" -m venv --clear "$VENV"
}

# The stamp names everything an installation depends on, and is written when all of it is done:
# an interrupted installation is completed by the next run.
setup_env() {
    local extras="$1" torch stamp key
    if ((GPUS > 0)); then torch="torch>=2.4"; else torch="torch==2.13.0"; fi
    torch="${DS_KFAC_TORCH:-$torch}"
    stamp="$VENV/.ds_kfac-${extras//,/-}"
    key="$ROOT $torch $(cksum <"$ROOT/setup.py")"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]] && supported_python "$PY"; then
        echo "using $VENV"
    else
        create_venv
        local -a pip=("$PY" -m pip install --quiet --disable-pip-version-check --no-input)
        echo "installing $torch (this can take some minutes)"
        "${pip[@]}" "$torch"
        "$PY" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \
            >"$VENV/constraints.txt"
        echo "installing ds_kfac[$extras]"
        "${pip[@]}" --constraint "$VENV/constraints.txt" --editable "$ROOT[$extras]"
        printf '%s\n' "$key" >"$stamp"
    fi
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$ROOT/.torch_extensions}"
    if ((GPUS == 0)); then export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"; fi
}
