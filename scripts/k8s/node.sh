#!/usr/bin/env bash
# One pod's part of a training job: what the manifests of this folder start in the training container.
#
#   NUM_NODES, JOB_COMPLETION_INDEX   how many pods, and which one this is (from 0)
#   MASTER_ADDR, MASTER_PORT          the first pod's name, JobSet's coordinator, and a port on it
#   DEVICE=cpu                        train on the CPU over gloo although there are GPUs
#   RUN_DIR and the rest              base/settings.env
# shellcheck disable=SC2154 # variables are set and read across the files that are sourced
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$checkout/scripts/lib/messages.sh"
source "$checkout/scripts/lib/settings.sh"

for name in NUM_NODES JOB_COMPLETION_INDEX MASTER_ADDR RUN_DIR; do
    [[ -n ${!name:-} ]] || fail "$name is not set; start this script from the manifests in scripts/k8s" 2
done
need_whole NUM_NODES "$NUM_NODES"
need_whole JOB_COMPLETION_INDEX "$JOB_COMPLETION_INDEX" 0 "$((NUM_NODES - 1))"
check_settings
dry_run=${MEGASCAN_DRY_RUN:-} need_folder RUN_DIR "$RUN_DIR"
[[ -n ${MEGASCAN_DRY_RUN:-} ]] || mkdir -p "$RUN_DIR"
read_settings
[[ ${DEVICE:-} != cpu ]] || options+=(--cpu)

if ((NUM_NODES == 1)); then
    exec bash "$checkout/scripts/run_single_gpt.sh" "${options[@]}" -- "${flags[@]}"
fi
node_names() { # JobSet's names of the pods: the coordinator's, with another pod index
    local rank name
    echo "$MASTER_ADDR"
    for ((rank = 1; rank < NUM_NODES; rank++)); do
        name=${MASTER_ADDR/-0-0./-0-$rank.}
        [[ $name != "$MASTER_ADDR" ]] || name=pod-$rank # a coordinator given as an address tells no names
        echo "$name"
    done
}
options+=(--multi-node --node-ips "$(node_names | paste -sd,)"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
if ((JOB_COMPLETION_INDEX == 0)); then
    exec bash "$checkout/scripts/run_master_gpt.sh" "${options[@]}" -- "${flags[@]}"
fi
exec bash "$checkout/scripts/run_worker_gpt.sh" --node-rank "$JOB_COMPLETION_INDEX" "${options[@]}" -- "${flags[@]}"
