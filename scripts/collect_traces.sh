#!/usr/bin/env bash
# Gathers the rank files that the nodes of a job wrote to their own disks into one folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/messages.sh"

usage="usage: bash scripts/collect_traces.sh -o DIR SOURCE…

Copies the rank files of every SOURCE into DIR, which python aggregate.py -b DIR takes. A SOURCE is a folder, or
HOST:FOLDER, which is read over ssh (rsync where both sides have it, else scp). Nothing is deleted or overwritten: after
an elastic restart two nodes may hold files of one place in the job, which are then kept side by side.

  -o, --output DIR  the folder to gather in; it may exist
  --dry-run         print what would be run (also: MEGASCAN_DRY_RUN=1)
  -h, --help        this text

example: bash scripts/collect_traces.sh -o gathered trace_output 10.0.0.2:/home/me/trace_output"

output='' dry_run=${MEGASCAN_DRY_RUN:-} sources=()
while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    case $1 in
    -h | --help) show_help ;;
    --dry-run) dry_run=1 && shift ;;
    -o | --output) need_value "$@" && output=$2 && shift 2 ;;
    "") fail "a source is empty; give FOLDER or HOST:FOLDER" 2 ;;
    -*) fail "unknown option '$1'; see --help" 2 ;;
    *) sources+=("$1") && shift ;;
    esac
done
[[ -n $output ]] || fail "no folder to gather in; give it with -o DIR" 2
((${#sources[@]})) || fail "no source; give the trace folder of every node, as FOLDER or HOST:FOLDER" 2

is_remote() { [[ $1 =~ ^[^/]+: && ! -e $1 ]]; }

fetch() { # source, new folder
    local command=(cp -p "$1"/benchmark-data-*.json* "$2/") # packed ones too
    if is_remote "$1"; then
        command=(scp -q -p "$1/benchmark-data-*.json*" "$2/")
        ! command -v rsync >/dev/null || command=(rsync -a "$1/" --include='benchmark-data-*.json*' --exclude='*' "$2/")
    fi
    if [[ -n $dry_run ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
        return
    fi
    is_remote "$1" || [[ -f ${command[2]} ]] || fail "$1 holds no rank files (benchmark-data-*.json)"
    "${command[@]}" || fail "the rank files of $1 cannot be read; see the message above"
}

place() { # a fetched file: keep it beside whatever has its name
    local name=${1##*/} target number=1 ending=.json
    [[ $name != *.json.gz ]] || ending=.json.gz
    target=$output/$name
    while [[ -e $target ]]; do
        ! cmp -s "$1" "$target" || return 0
        number=$((number + 1)) target=$output/${name%"$ending"}.$number$ending
    done
    mv "$1" "$target"
}

if [[ -n $dry_run ]]; then
    for source in "${sources[@]}"; do fetch "$source" "$output"; done
    exit
fi
need_folder --output "$output"
mkdir -p "$output"
inbox=$(mktemp -d "$output/.incoming.XXXXXX")
trap 'rm -rf "$inbox"' EXIT
for i in "${!sources[@]}"; do
    mkdir "$inbox/$i"
    fetch "${sources[i]}" "$inbox/$i"
    for file in "$inbox/$i"/*.json*; do
        [[ -f $file ]] || fail "${sources[i]} holds no rank files (benchmark-data-*.json)"
        place "$file"
    done
done
num_files=$(find "$output" -maxdepth 1 -name 'benchmark-data-*.json*' | wc -l)
printf 'wrote %s, which holds %d rank files; next: python aggregate.py -b %q -d\n' "$output" "$num_files" "$output"
