#!/usr/bin/env bash
# One node's part of run.slurm, started by srun once a node: the variables become options of the run_*_gpt.sh scripts.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

options=(--trace-dir "$RUN_DIR/trace")
add() { [[ -z $2 ]] || options+=("$1" "$2"); }
add --num-gpus "${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
add --tensor-model-parallel-size "${TP:-}"
add --pipeline-model-parallel-size "${PP:-}"
add --context-parallel-size "${CP:-}"
add --model "${MODEL:-}"
add --train-iters "${TRAIN_ITERS:-}"
add --micro-batch-size "${MICRO_BATCH_SIZE:-}"
add --global-batch-size "${GLOBAL_BATCH_SIZE:-}"
add --data-path "${DATA_PATH:-}"
add --vocab-file "${VOCAB_FILE:-}"
add --merge-file "${MERGE_FILE:-}"
add --tokenizer-model "${TOKENIZER_MODEL:-}"
[[ ${SAVE_INTERVAL:-100} == 0 ]] || options+=(--save "$RUN_DIR/checkpoints" --save-interval "${SAVE_INTERVAL:-100}")
read -ra more <<<"${TRAIN_FLAGS:-}"
flags=(--tensorboard-dir "$RUN_DIR/tensorboard" "${more[@]}")

if ((SLURM_JOB_NUM_NODES == 1)); then
    exec bash scripts/run_single_gpt.sh "${options[@]}" -- "${flags[@]}"
fi
options+=(--multi-node --node-ips "$NODE_IPS" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if ((SLURM_NODEID == 0)); then
    exec bash scripts/run_master_gpt.sh "${options[@]}" -- "${flags[@]}"
fi
exec bash scripts/run_worker_gpt.sh --node-rank "$SLURM_NODEID" "${options[@]}" -- "${flags[@]}"
