# shellcheck shell=bash disable=SC2034 # the arrays are used by the file that sources this
# Sourced by what a scheduler starts once a node: environment variables become the options of run_*_gpt.sh, in the array
# `options`, and the trainer's flags behind --, in the array `flags`. Unset and empty variables leave the default.

read_settings() {
    local flag name
    options=(--trace-dir "$RUN_DIR/trace")
    while read -r flag name; do
        [[ -z ${!name:-} ]] || options+=("$flag" "${!name}")
    done <<'PAIRS'
--num-gpus RANKS_PER_NODE
--tensor-model-parallel-size TP
--pipeline-model-parallel-size PP
--context-parallel-size CP
--model MODEL
--train-iters TRAIN_ITERS
--micro-batch-size MICRO_BATCH_SIZE
--global-batch-size GLOBAL_BATCH_SIZE
--data-path DATA_PATH
--vocab-file VOCAB_FILE
--merge-file MERGE_FILE
--tokenizer-model TOKENIZER_MODEL
PAIRS
    [[ ${SAVE_INTERVAL:-100} == 0 ]] ||
        options+=(--save "$RUN_DIR/checkpoints" --save-interval "${SAVE_INTERVAL:-100}")
    read -ra flags <<<"${TRAIN_FLAGS:-}"
    flags=(--tensorboard-dir "$RUN_DIR/tensorboard" "${flags[@]}")
}
