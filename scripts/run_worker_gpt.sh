#!/usr/bin/env bash
# Trains a GPT on several nodes, traced: the part of every node but the first, which starts run_master_gpt.sh.
# shellcheck disable=SC2034,SC2154 # variables are set and read across the files that are sourced
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/nodes.sh"

usage="usage: bash scripts/run_worker_gpt.sh --node-ips A,B,… [options] [-- training flags]

One of the other nodes' part of a training job on several nodes; the first one starts scripts/run_master_gpt.sh with
the same options. Which node this is, is found by its addresses.

  --node-rank N     place of this machine in --node-ips, from 0, when its addresses do not tell
$nodes_usage

$shared_usage

examples, for four nodes of 4 GPUs:
  bash scripts/run_worker_gpt.sh --multi-node --node-ips 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 --num-gpus 4 --tp 4
  bash scripts/run_worker_gpt.sh --elastic --nnodes 2:4 --max-restarts 3 --rdzv-endpoint 10.0.0.1 --save /shared/ckpt"

while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    if [[ $1 == --node-rank ]]; then
        need_value "$@" && need_whole "$1" "$2" 0
        node_rank=$2 taken=2
    else
        take_node_option "$@"
    fi
    ((taken)) || refuse_option "$1"
    shift "$taken"
done
$elastic || [[ $node_ips == *,* ]] ||
    fail "a worker needs --node-ips with two nodes or more (or --elastic); on one machine use scripts/run_single_gpt.sh" 2
read_nodes
if [[ -n $node_ips ]]; then
    choose_node_rank
    $elastic || ((node_rank > 0)) || fail "this machine is node 0 of $node_ips; start scripts/run_master_gpt.sh here"
fi
plan_launch
start_job
say_next false
