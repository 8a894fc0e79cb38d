#!/usr/bin/env bash
# Run the golden cases with the oldest versions of what the base install requires (pyproject.toml), and nothing else
# installed: no pandas, no torch.
#
#   bash scripts/oldest_versions.sh
#
# compute-tp2-pp2-dp2 is left out: an older scipy rounds its p-values in the twelfth digit, which a timeline holds.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
find_python # nothing of the usual environment is needed

folder=.venv/oldest
oldest=$("$BASE_PYTHON" -c '
import tomllib
for wanted in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    print(wanted.replace(">=", "=="))
')
if [[ $(cat "$folder/installed" 2>/dev/null) != "$oldest" ]]; then
    rm -rf "$folder"
    "$BASE_PYTHON" -m venv "$folder"
    # shellcheck disable=SC2086 # one word a package
    "$folder/bin/python" -m pip install -q $oldest
    echo "$oldest" >"$folder/installed"
fi
failed=()
for name in $("$BASE_PYTHON" -c 'import tomllib; print(*tomllib.load(open("tests/golden/cases.toml", "rb")))'); do
    if [[ $name != compute-tp2-pp2-dp2 ]]; then
        "$folder/bin/python" tests/golden/golden.py --check --case "$name" || failed+=("$name")
    fi
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "error: with the oldest versions these differ: ${failed[*]}" >&2
    exit 1
fi
echo "the oldest versions give the same: $(echo "$oldest" | tr '\n' ' ')"
