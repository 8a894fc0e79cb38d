# shellcheck shell=bash
# Sourced by the other scripts: gives $PYTHON, an interpreter with the wanted extras, in .venv of the checkout.
#
#   MEGASCAN_PYTHON=/path/to/python   use that interpreter as it is and install nothing
#
# The install is repeated only when pyproject.toml, constraints.txt, what is compiled or the wanted extras change.

prepare_environment() { # extras, for example "train,dev"
    local root extras=$1 stamp wanted log seldom
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    cd "$root" || exit
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
    if [[ -n ${MEGASCAN_PYTHON:-} ]]; then
        PYTHON=$MEGASCAN_PYTHON
        check_python
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    stamp=.venv/installed log=.venv/install.log
    wanted="$extras $(cat pyproject.toml constraints.txt hatch_build.py megascan/reader/lines.c | cksum)"
    PYTHON=$root/.venv/bin/python
    if [[ -x $PYTHON && -f $stamp ]] && grep -qxF "$wanted" "$stamp"; then
        return
    fi
    find_python
    echo "setting up .venv with the extras $extras (a minute or two; log: $log)" >&2
    [[ -x $PYTHON ]] || "$BASE_PYTHON" -m venv .venv
    # The pip that Python brings may be years old, and then looks for releases three times as long. It will do, however.
    "$PYTHON" -m pip install --upgrade pip >"$log" 2>&1 || true
    if ! "$PYTHON" -m pip install --no-compile -c constraints.txt -e ".[$extras]" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "error: the install failed; the whole log is $root/$log" >&2
        exit 1
    fi
    # Compile on all cores, as pip uses only one, but not the half that is hardly ever imported. Files for other Pythons,
    # which some packages carry, do not compile.
    seldom='/tests?/|/(hypothesis|kubeflow_trainer_api|lexers|mypyc?|openai|pip)/|/transformers/models/'
    seldom+='|/torch/testing/|/sympy/physics/|/dask/(array|dataframe)/'
    "$PYTHON" -m compileall -qq -j 0 -x "$seldom" .venv/lib >/dev/null 2>&1 || true
    echo "$wanted" >>"$stamp"
}

check_python() { # the one that MEGASCAN_PYTHON names
    if ! command -v "$PYTHON" >/dev/null || [[ -d $PYTHON ]]; then
        echo "error: MEGASCAN_PYTHON is $PYTHON, which cannot be run; name a Python 3.11 or newer, or unset it" >&2
        exit 1
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: MEGASCAN_PYTHON is $PYTHON, which is no Python 3.11 or newer; name one, or unset it" >&2
        exit 1
    }
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            BASE_PYTHON=$candidate
            return
        fi
    done
    echo "error: no Python 3.11 or newer on the PATH; install one, or name one with MEGASCAN_PYTHON" >&2
    exit 1
}
