# shellcheck shell=bash disable=SC2034 # the arrays are used by the file that sources this
# Sourced by what a scheduler starts once a node: environment variables become the options of run_*_gpt.sh, in the array
# `options`, and the trainer's flags behind --, in the array `flags`. Unset and empty variables leave the default.

check_settings() { # the variables' own values; what they mean together is checked by the run_*_gpt.sh scripts
    local name
    for name in RANKS_PER_NODE TP PP CP TRAIN_ITERS MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE; do
        [[ -z ${!name:-} ]] || need_whole "$name" "${!name}"
    done
    [[ -z ${SAVE_INTERVAL:-} ]] || need_whole SAVE_INTERVAL "$SAVE_INTERVAL" 0
    [[ -z ${MASTER_PORT:-} ]] || need_whole MASTER_PORT "$MASTER_PORT" 1 65535
    is_one_of "${MODEL:-small}" small 8b ||
        fail "MODEL is '$MODEL', expected small or 8b; other sizes are flags in TRAIN_FLAGS" 2
    is_one_of "${DEVICE:-}" "" cpu || fail "DEVICE is '$DEVICE', expected cpu or nothing" 2
}

check_software() { # where Python comes from in a Slurm job; MEGASCAN_PYTHON counts where none of these is set
    local kinds=() name
    for name in CONTAINER_IMAGE CONDA_ENV VENV; do
        [[ -z ${!name:-} ]] || kinds+=("$name")
    done
    ((${#kinds[@]} < 2)) || fail "${kinds[0]} and ${kinds[1]} exclude each other; set one" 2
}

read_tokenizer() { # the array `tokenizer` of flags for training.preprocess_data
    if [[ -n ${TOKENIZER_MODEL:-} && -z ${VOCAB_FILE:-}${MERGE_FILE:-} ]]; then
        need_path TOKENIZER_MODEL "$TOKENIZER_MODEL"
        tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
    elif [[ -z ${TOKENIZER_MODEL:-} && -n ${VOCAB_FILE:-} && -n ${MERGE_FILE:-} ]]; then
        need_path VOCAB_FILE "$VOCAB_FILE"
        need_path MERGE_FILE "$MERGE_FILE"
        tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
    else
        fail "the tokenizer is not clear; set VOCAB_FILE and MERGE_FILE, or TOKENIZER_MODEL" 2
    fi
}

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
