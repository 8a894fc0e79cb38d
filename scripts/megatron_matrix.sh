#!/usr/bin/env bash
# Run the tracer's tests on several releases of megatron-core: the one that constraints.txt pins and the newest on the
# package index, or those that are named.
#
#   bash scripts/megatron_matrix.sh                  the pinned release and the newest
#   bash scripts/megatron_matrix.sh 0.16.1 0.17.0    these
#   MEGATRON_LM=DIR bash scripts/megatron_matrix.sh  then NVIDIA's own scripts from that checkout of Megatron-LM, too
#
# Each release gets a virtual environment of its own in .venv/matrix: over the packages of .venv where the release takes
# that Python, else a whole one with the newest Python on the PATH (megatron-core 0.17 and newer want 3.12).
set -euo pipefail
shopt -s inherit_errexit # what fails within $(…) ends the script, too
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment train,serve,cluster,watch,dev

newest_release() {
    "$PYTHON" -m pip index versions --ignore-requires-python megatron-core 2>/dev/null |
        sed -n '1s/.*(\(.*\))/\1/p'
}

newer_python() {
    local candidate
    for candidate in python3.13 python3.12 python3; do # asked: a version manager's shim may stand for none
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: megatron-core $1 wants Python 3.12 or newer, and there is none on the PATH; install one" >&2
    return 1
}

environment_of() { # release; prints its interpreter
    local folder=$ROOT/.venv/matrix/$1 site newer
    if [[ -f $folder/installed ]]; then
        echo "$folder/bin/python"
        return
    fi
    rm -rf "$folder"
    if "$PYTHON" -m pip download -q --no-deps -d "$folder.wheel" "megatron-core==$1" >/dev/null 2>&1; then
        "$PYTHON" -m venv "$folder"
        site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        "$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/of-the-checkout.pth"
        "$folder/bin/python" -m pip install -q --no-deps --ignore-installed "$folder.wheel"/* >&2
    else
        newer=$(newer_python "$1")
        "$newer" -m venv "$folder"
        grep -v '^megatron-core==' constraints.txt >"$folder/constraints.txt"
        "$folder/bin/python" -m pip install -q -c "$folder/constraints.txt" "megatron-core==$1" \
            -e ".[train]" pytest pytest-timeout pytest-rerunfailures hypothesis pandas pybind11 einops >&2
    fi
    touch "$folder/installed"
    echo "$folder/bin/python"
}

ROOT=$PWD
RELEASES=("$@")
if [[ ${#RELEASES[@]} -eq 0 ]]; then
    RELEASES=("$(sed -n 's/^megatron-core==//p' constraints.txt)" "$(newest_release)")
fi
TESTS=(tests/tracer/test_session.py tests/tracer/test_modules.py tests/tracer/test_foreign_trainer.py
    tests/tracer/test_launch.py tests/instrument/test_simple_mcore_loop.py)
failed=()
for release in "${RELEASES[@]}"; do
    echo "== megatron-core $release"
    interpreter=$(environment_of "$release")
    found=$("$interpreter" -c 'from importlib.metadata import version; print(version("megatron-core"))')
    if [[ $found != "$release" ]]; then
        echo "error: $interpreter finds megatron-core $found, not $release; delete $ROOT/.venv/matrix" >&2
        exit 1
    fi
    PYTHONPATH=$ROOT "$interpreter" -m pytest -q --reruns 1 "${TESTS[@]}" || failed+=("$release")
done
if [[ -n ${MEGATRON_LM:-} ]]; then
    echo "== Megatron-LM in $MEGATRON_LM, with the environment of megatron-core ${RELEASES[-1]}"
    PYTHONPATH=$ROOT "$interpreter" -m pytest -q tests/instrument/test_megatron_lm.py || failed+=("of $MEGATRON_LM")
fi
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "error: the tracer's tests fail on megatron-core ${failed[*]}" >&2
    exit 1
fi
echo "the tracer's tests pass on megatron-core ${RELEASES[*]}"
