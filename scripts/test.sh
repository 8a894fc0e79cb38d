#!/usr/bin/env bash
# Formatting, lint, types and the whole test suite, from a bare checkout.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh tests/…    only these tests (arguments go to pytest)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment train,serve,cluster,dev

echo "== format"
"$PYTHON" -m ruff format --check .
echo "== lint"
"$PYTHON" -m ruff check .
echo "== types"
"$PYTHON" -m mypy
echo "== tests"
if [[ $# -gt 0 ]]; then
    exec "$PYTHON" -m pytest "$@"
fi
# On a shared machine a neighbour's load can pass for a fault. What is broken fails twice.
pytest_twice() { "$PYTHON" -m pytest -q --durations=10 --reruns 1 "$@"; }
pytest_twice -n 2 -m "not distributed"
echo "== tests that start several ranks each, two files at a time"
pytest_twice -n 2 --dist loadfile -m "distributed and not alone"
echo "== tests that judge what several ranks take, one after the other"
pytest_twice -m alone
