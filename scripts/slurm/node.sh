#!/usr/bin/env bash
# One node's part of run.slurm, started by srun once a node: the variables become options of the run_*_gpt.sh scripts.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

source scripts/lib/settings.sh
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
read_settings

if ((SLURM_JOB_NUM_NODES == 1)); then
    exec bash scripts/run_single_gpt.sh "${options[@]}" -- "${flags[@]}"
fi
options+=(--multi-node --node-ips "$NODE_IPS" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if ((SLURM_NODEID == 0)); then
    exec bash scripts/run_master_gpt.sh "${options[@]}" -- "${flags[@]}"
fi
exec bash scripts/run_worker_gpt.sh --node-rank "$SLURM_NODEID" "${options[@]}" -- "${flags[@]}"
