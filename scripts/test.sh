#!/usr/bin/env bash
# Formatting, lint, types and the whole test suite, from a bare checkout.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh tests/…    only these tests (arguments go to pytest)
#
# Tests of the report page need Chromium, which is used where it is installed. On Debian, as root and in CI (the
# variable CI is set), the script installs it.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_chromium() { # the report page is drawn in it; without it those tests are skipped
    local name
    for name in chromium-headless-shell chromium google-chrome chromium-browser; do
        if command -v "$name" >/dev/null; then return; fi
    done
    if [[ -z ${CI:-} || $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "note: no Chromium, so the report page is not tested in a browser (Debian: apt-get install chromium-headless-shell)" >&2
        return
    fi
    mkdir -p .venv
    echo "installing Chromium, for the tests of the report page" >&2
    # The whole browser draws windows that nobody sees: half of the time of those tests.
    if ! { apt-get update && { apt_install chromium-headless-shell || apt_install chromium; }; } \
        >.venv/chromium.log 2>&1; then
        echo "note: Chromium could not be installed (.venv/chromium.log); the page is not tested in a browser" >&2
    fi
}

apt_install() { # package
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$1"
}

install_chromium & # beside the other packages, which take about as long and one core
trap wait EXIT # what fails leaves no half-installed package behind
source scripts/environment.sh
prepare_environment train,serve,cluster,watch,dev

echo "== format"
"$PYTHON" -m ruff format --check .
echo "== lint"
"$PYTHON" -m ruff check .
echo "== types"
"$PYTHON" -m mypy --num-workers auto
wait
echo "== tests"
if [[ $# -gt 0 ]]; then
    exec "$PYTHON" -m pytest "$@"
fi
unset PYTHONDONTWRITEBYTECODE # with it each of the many processes compiles what it imports anew
# On a shared machine a neighbour's load can pass for a fault. What is broken fails twice.
pytest_twice() { "$PYTHON" -m pytest -q --durations=10 --reruns 1 "$@"; }
# Two files at a time: a file's tests share what they have made. Those of several ranks come first (tests/conftest.py).
pytest_twice -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
echo "== tests that judge times, one after the other"
pytest_twice -m alone  # imports only the files that hold some (tests/conftest.py)
