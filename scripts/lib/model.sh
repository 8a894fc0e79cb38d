# shellcheck shell=bash disable=SC2034,SC2154 # variables are set and read across the files that are sourced
# Sourced: what is trained. Sets the arrays model_flags and data_flags from $model, $device and the data options.

choose_model() {
    case $model:$device in
    small:gpu) # 1.7 billion parameters: large enough that a GPU, not its host, sets the pace
        micro_batch_size=${micro_batch_size:-2}
        model_flags=(--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048
            --max-position-embeddings 2048 --bf16) ;;
    small:cpu)
        micro_batch_size=${micro_batch_size:-2}
        model_flags=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64
            --max-position-embeddings 64) ;;
    8b:*) # the shape of Llama 3 8B
        micro_batch_size=${micro_batch_size:-1}
        model_flags=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
            --num-attention-heads 32 --group-query-attention --num-query-groups 8
            --seq-length 4096 --max-position-embeddings 8192
            --position-embedding-type rope --rotary-base 500000
            --normalization RMSNorm --swiglu --disable-bias-linear
            --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
            --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
            --recompute-granularity selective)
        ((tensor_size == 1)) || model_flags+=(--sequence-parallel)
        [[ $device == gpu ]] || note "the 8B model is meant for GPUs; on the CPU an iteration takes hours" ;;
    esac
    model_flags+=(--transformer-impl local)
    [[ $device == gpu ]] && model_flags+=(--distributed-backend nccl) || model_flags+=(--distributed-backend gloo)
}

choose_data() {
    if [[ -z $data_path ]]; then
        [[ -z $vocab_file$merge_file$tokenizer_model ]] ||
            fail "a tokenizer is given and no --data-path; give the data, or leave the tokenizer out for mock data" 2
        data_flags=(--mock-data --tokenizer-type NullTokenizer --num-workers 0)
        [[ $device == gpu ]] && data_flags+=(--vocab-size 32000) || data_flags+=(--vocab-size 1000)
        return
    fi
    [[ -f $data_path.bin && -f $data_path.idx ]] ||
        fail "there is no $data_path.bin with $data_path.idx; make them with python -m training.preprocess_data"
    data_flags=(--data-path "$data_path")
    if [[ -n $tokenizer_model ]]; then
        [[ -z $vocab_file$merge_file ]] ||
            fail "--tokenizer-model and --vocab-file with --merge-file exclude each other; keep one kind" 2
        need_path --tokenizer-model "$tokenizer_model"
        data_flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer_model")
    elif [[ -n $vocab_file && -n $merge_file ]]; then
        need_path --vocab-file "$vocab_file"
        need_path --merge-file "$merge_file"
        data_flags+=(--tokenizer-type GPT2BPETokenizer --vocab-file "$vocab_file" --merge-file "$merge_file")
    else
        fail "--data-path needs its tokenizer: --vocab-file with --merge-file, or --tokenizer-model" 2
    fi
}
