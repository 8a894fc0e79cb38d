#!/usr/bin/env bash
# One node's part of run.slurm, started by srun once a node: the variables become options of the run_*_gpt.sh scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/lib/messages.sh
source scripts/lib/settings.sh
for name in SLURM_JOB_NUM_NODES SLURM_NODEID NODE_IPS MASTER_ADDR MASTER_PORT RUN_DIR; do
    [[ -n ${!name:-} ]] || fail "$name is not set; run.slurm starts this script, by srun, on every node" 2
done
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
