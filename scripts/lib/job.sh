# shellcheck shell=bash disable=SC2034,SC2154 # variables are set and read across the files that are sourced
# Sourced by the run_*_gpt.sh scripts: the options they share, the training command made of them, running it.
#
# take_option reads one shared option; plan_job checks everything and fills the arrays `variables` (environment) and
# `training`; start_job prints or runs `launcher` with them.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/lib/messages.sh"
source "$root/scripts/lib/devices.sh"
source "$root/scripts/lib/model.sh"
source "$root/scripts/environment.sh"

num_gpus='' model=small tensor_size='' pipeline_size=1 context_size=1 train_iters=20
micro_batch_size='' global_batch_size='' data_path='' vocab_file='' merge_file='' tokenizer_model=''
trace=true trace_dir='' save='' save_interval='' max_restarts=0 use_cpu=false use_dpp=false
dry_run=${MEGASCAN_DRY_RUN:-} extra=()

shared_usage='  --num-gpus N      ranks on this node (default: one a GPU; without GPUs 4 processes on the CPU)
  --cpu             train on the CPU over gloo although there are GPUs
  --tensor-model-parallel-size N, --tp N     (default: 2 if the ranks are even, else 1)
  --pipeline-model-parallel-size N, --pp N   (default: 1)
  --context-parallel-size N, --cp N          (default: 1)
  --use-dpp         plan in which order the pipeline works (docs/dynamic-pipeline.md); needs --pp 2 or more
  --model NAME      small (default: 1.7 B parameters on GPUs, 0.5 M on the CPU) or 8b (the shape of Llama 3 8B)
  --train-iters N   iterations (default: 20)
  --micro-batch-size N, --global-batch-size N   (default: 4 micro-batches a replica)
  --data-path PREFIX   a .bin/.idx pair without its ending (default: mock data), with its tokenizer:
  --vocab-file FILE --merge-file FILE           GPT-2 style BPE, or
  --tokenizer-model PATH                        a tokenizer.json or its folder
  --trace-dir DIR   where this node writes its rank files (default: trace_output); --no-trace: none
  --save DIR        write checkpoints there every --save-interval N iterations (default: 100), and resume from them
  --max-restarts N  let torchrun start the ranks again up to N times after one has failed (default: 0)
  --dry-run         print what would be run, copy-and-paste-able, and run nothing (also: MEGASCAN_DRY_RUN=1)
  -h, --help        this text
  -- FLAGS          everything after -- goes to training.pretrain_gpt as it is: python -m training.pretrain_gpt --help

Values follow their option or stand behind =, as in --tp=2. MEGASCAN_PYTHON=/path/to/python uses that interpreter; otherwise
.venv of the checkout is made on first use.'

take_option() { # the words that are left; sets `taken`, the number of words that belong to the first option; 0: unknown
    taken=1
    case $1 in
    -h | --help) show_help ;;
    --dry-run) dry_run=1 && return ;;
    --no-trace) trace=false && return ;;
    --cpu) use_cpu=true && return ;;
    --use-dpp) use_dpp=true && return ;;
    --)
        extra=("${@:2}") taken=$#
        return ;;
    esac
    taken=2
    case $1 in
    --num-gpus) take_whole num_gpus "$@" ;;
    --tensor-model-parallel-size | --tp) take_whole tensor_size "$@" ;;
    --pipeline-model-parallel-size | --pp) take_whole pipeline_size "$@" ;;
    --context-parallel-size | --cp) take_whole context_size "$@" ;;
    --train-iters) take_whole train_iters "$@" ;;
    --micro-batch-size) take_whole micro_batch_size "$@" ;;
    --global-batch-size) take_whole global_batch_size "$@" ;;
    --save-interval) take_whole save_interval "$@" ;;
    --max-restarts) need_value "$@" && need_whole "$1" "$2" 0 && max_restarts=$2 ;;
    --model) take_text model "$@" && { is_one_of "$model" small 8b ||
        fail "--model is '$model', expected small or 8b; other sizes are flags after --" 2; } ;;
    --data-path) take_text data_path "$@" ;;
    --vocab-file) take_text vocab_file "$@" ;;
    --merge-file) take_text merge_file "$@" ;;
    --tokenizer-model) take_text tokenizer_model "$@" ;;
    --trace-dir) take_text trace_dir "$@" ;;
    --save) take_text save "$@" ;;
    *) taken=0 ;;
    esac
}

take_whole() { # variable option value…
    need_value "${@:2}" && need_whole "$2" "$3"
    printf -v "$1" %s "$3"
}

take_text() { # variable option value…
    need_value "${@:2}"
    [[ $3 != --* ]] || fail "$2 needs a value and is followed by $3; see --help" 2
    printf -v "$1" %s "$3"
}

refuse_option() { # the first word that no option takes
    [[ $1 == -* ]] || fail "'$1' is no option; see --help" 2
    fail "unknown option '$1'; see --help, and put flags of the trainer after --" 2
}

plan_job() { # lowest and highest number of nodes
    num_nodes=$1
    choose_ranks
    choose_output
    local ranks=$((num_gpus * $1)) model_parallel
    tensor_size=${tensor_size:-$((ranks % (2 * pipeline_size * context_size) ? 1 : 2))}
    model_parallel=$((tensor_size * pipeline_size * context_size))
    refuse_doubles
    choose_model
    choose_data
    choose_batch "$1" "$2" "$model_parallel"
    training=(--tensor-model-parallel-size "$tensor_size" --pipeline-model-parallel-size "$pipeline_size")
    ((context_size == 1)) || training+=(--context-parallel-size "$context_size")
    ! $use_dpp || training+=(--use-dpp)
    training+=("${model_flags[@]}" "${data_flags[@]}" --micro-batch-size "$micro_batch_size"
        --global-batch-size "$global_batch_size"
        --train-iters "$train_iters" --lr 1e-4 --log-interval 5 --eval-iters 0)
    [[ -z $save ]] || training+=(--save "$save" --load "$save" --save-interval "$save_interval")
    ! $trace || training+=(--trace --trace-dir "$trace_dir" --trace-interval 5
        --continuous-trace-iterations 2 --trace-granularity full)
    training+=("${extra[@]}")
    variables=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
        PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}")
    [[ $device == cpu ]] || variables+=(CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}")
}

choose_ranks() { # sets device and num_gpus
    local found most=$((32 * $(nproc)))
    found=$(count_gpus)
    $use_cpu && found=0
    if ((found)); then
        device=gpu num_gpus=${num_gpus:-$found}
        ((num_gpus <= found)) ||
            fail "--num-gpus is $num_gpus and this machine has $found GPUs; ask for fewer, or add --cpu"
        return
    fi
    device=cpu num_gpus=${num_gpus:-4}
    ((num_gpus <= most)) ||
        fail "--num-gpus is $num_gpus, and without GPUs this machine takes at most $most processes (32 a core); ask for fewer"
    $use_cpu || note "no GPU found on this machine; training with $num_gpus processes on the CPU over gloo"
}

choose_output() { # where the trace and the checkpoints go
    $trace || [[ -z $trace_dir ]] || fail "--no-trace and --trace-dir exclude each other; keep one" 2
    [[ -n $save || -z $save_interval ]] || fail "--save-interval belongs to --save DIR; add it" 2
    trace_dir=${trace_dir:-trace_output} save_interval=${save_interval:-100}
    ! $trace || need_folder --trace-dir "$trace_dir"
    [[ -z $save ]] || need_folder --save "$save"
}

choose_batch() { # lowest and highest number of nodes, ranks of a replica: a batch that each number of nodes can split
    local nodes batch=$((4 * micro_batch_size)) share a b rest
    for ((nodes = $1; nodes <= $2; nodes++)); do
        ((num_gpus * nodes % $3 == 0)) ||
            fail "$((num_gpus * nodes)) ranks ($nodes x $num_gpus) cannot be split into replicas of tensor $tensor_size x pipeline $pipeline_size x context $context_size = $3 ranks; change one of these"
        share=$((micro_batch_size * num_gpus * nodes / $3))
        if [[ -n $global_batch_size ]]; then
            ((global_batch_size % share == 0)) && continue
            fail "--global-batch-size $global_batch_size is not divisible by $share, the micro-batch size $micro_batch_size x $((share / micro_batch_size)) replicas on $((num_gpus * nodes)) ranks ($nodes x $num_gpus); change one of these"
        fi
        a=$batch b=$((4 * share))
        while ((b)); do rest=$((a % b)) a=$b b=$rest; done
        batch=$((batch * 4 * share / a)) # the least common multiple
        ((batch <= 1000000)) ||
            fail "no batch below 1000000 can be split on every number of nodes from $1 to $2; give --global-batch-size or a smaller range"
    done
    global_batch_size=${global_batch_size:-$batch}
}

refuse_doubles() { # an option of these scripts behind -- would be checked as if it were not there
    local word option
    for word in "${extra[@]}"; do
        option=${word%%=*}
        is_one_of "$option" --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size \
            --train-iters --micro-batch-size --global-batch-size --data-path --mock-data --vocab-file --merge-file \
            --tokenizer-model --trace --trace-dir --save --save-interval --use-dpp || continue
        fail "$option is an option of this script; give it before --" 2
    done
}

start_job() { # runs (or prints) the array launcher with the training command; the exit code is torchrun's
    local here=$PWD
    if [[ -n $dry_run ]]; then
        plan_environment
        check_flags
        print_command
        return
    fi
    prepare_environment train
    cd "$here" || fail "the folder $here is gone"
    check_flags
    [[ -z ${master_addr:-} ]] || need_meeting_place
    env "${variables[@]}" "$PYTHON" -m torch.distributed.run "${launcher[@]}" -m training.pretrain_gpt "${training[@]}"
}

plan_environment() { # the interpreter that prepare_environment would give, nothing installed
    PYTHON=${MEGASCAN_PYTHON:-$root/.venv/bin/python}
    [[ -n ${MEGASCAN_PYTHON:-} || -x $PYTHON ]] ||
        printf '(source %q && prepare_environment train)\n' "$root/scripts/environment.sh"
}

check_flags() { # the trainer's own checks, before any rank is started
    if [[ -n $dry_run ]] && ! command -v "$PYTHON" >/dev/null; then
        note "the training flags are not checked: $PYTHON is not installed yet"
        return
    fi
    env "${variables[@]}" "$PYTHON" "$root/scripts/lib/check_flags.py" "$((num_gpus * num_nodes))" "$num_gpus" \
        -- "${training[@]}" || exit $?
}

print_command() { # one word group a line
    local word line=''
    printf 'cd %q &&\n' "$PWD"
    for word in "${variables[@]}"; do line+="${word%%=*}=$(printf %q "${word#*=}") "; done
    line+="$(printf %q "$PYTHON") -m torch.distributed.run"
    for word in "${launcher[@]}" -m training.pretrain_gpt "${training[@]}"; do
        if [[ $word == -* && ! $word =~ ^-[0-9] ]]; then
            printf '%s \\\n' "$line"
            line="    $word"
        else
            line+=" $(printf %q "$word")"
        fi
    done
    printf '%s\n' "$line"
}

say_how_to_judge() { # the command that names the slow rank; an image has it installed and no checkout
    local program="$root/aggregate.py"
    if [[ -d $root/aggregate ]]; then
        printf 'next, name the slow rank: %q %q -b %q -d\n' "$PYTHON" "$program" "$trace_dir"
    else
        printf 'next, name the slow rank: %q -m megascan aggregate -b %q -d\n' "$PYTHON" "$trace_dir"
    fi
}
