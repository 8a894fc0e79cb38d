#!/usr/bin/env bash
# Trains a GPT on several nodes, traced: the first node's part. The others start run_worker_gpt.sh.
# shellcheck disable=SC2034,SC2154 # variables are set and read across the files that are sourced
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/nodes.sh"

usage="usage: bash scripts/run_master_gpt.sh --node-ips A,B,… [options] [-- training flags]

The first node's part of a training job on several nodes; start scripts/run_worker_gpt.sh with the same options on
each of the others, before or after. Without --node-ips this machine is the only node.

$nodes_usage

$shared_usage

examples, for four nodes of 4 GPUs:
  bash scripts/run_master_gpt.sh --multi-node --node-ips 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 --num-gpus 4 --tp 4
  bash scripts/run_master_gpt.sh --elastic --nnodes 2:4 --max-restarts 3 --rdzv-endpoint 10.0.0.1 --save /shared/ckpt"

while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    take_node_option "$@"
    ((taken)) || refuse_option "$1"
    shift "$taken"
done
given_meeting_place=$master_addr$rdzv_endpoint
read_nodes
[[ -z $node_ips ]] || choose_first_rank
if [[ -z $dry_run ]] && ! $elastic && is_port_taken "$master_addr" "$master_port"; then
    fail "port $master_port of this machine is taken; give another --master-port, the same on every node"
fi
plan_launch
start_job
say_next true
