#!/usr/bin/env bash
# Trains a GPT on the GPUs of this machine, traced.
# shellcheck disable=SC2034,SC2154 # variables are set and read across the files that are sourced
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

usage="usage: bash scripts/run_single_gpt.sh [options] [-- training flags]

Trains a GPT on this machine and writes a trace of it.

$shared_usage

examples:
  bash scripts/run_single_gpt.sh
  bash scripts/run_single_gpt.sh --num-gpus 4 --tp 2 --pp 2 -- --inject-fault rank=3,kind=compute,factor=1.5
  bash scripts/run_single_gpt.sh --model 8b --tp 4 --dry-run"

while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    take_option "$@"
    ((taken)) || refuse_option "$1"
    shift "$taken"
done
plan_job 1 1
launcher=(--standalone --nproc-per-node "$num_gpus" --max-restarts "$max_restarts")
start_job
! $trace || [[ -n $dry_run ]] || say_how_to_judge
