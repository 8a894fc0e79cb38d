#!/usr/bin/env bash
# Submits a traced training job to Slurm, and a job after it that names the slow rank.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/lib/messages.sh
source scripts/lib/settings.sh

usage="usage: bash scripts/slurm/submit.sh [options] [-- more options of sbatch]

Submits scripts/slurm/run.slurm, and scripts/slurm/aggregate.slurm to run after it. Everything else is said by environment
variables, which the head of scripts/slurm/run.slurm lists: MODEL, TP, PP, CP, DATA_PATH, TRAIN_FLAGS, CONTAINER_IMAGE, …

  --nodes N          nodes (default: 2)
  --gpus-per-node N  GPUs, and ranks, of a node (default: 4); 0: on the CPU, RANKS_PER_NODE ranks a node
  --time H:MM:SS     limit of the training job (default: 01:00:00)
  --name NAME        name of the job and beginning of its folder's name (default: megascan)
  --preprocess       first turn INPUT into OUTPUT_PREFIX (scripts/slurm/preprocess.slurm) and train on that
  --dry-run          print what would be submitted, copy-and-paste-able (also: MEGASCAN_DRY_RUN=1)
  -h, --help         this text
  -- OPTIONS         go to every sbatch as they are, for example -- --partition gpu --account me

example: TP=4 MODEL=8b TRAIN_ITERS=200 bash scripts/slurm/submit.sh --nodes 4 --gpus-per-node 4 -- --partition gpu"

need_match() { # what is expected, pattern, option and its value
    need_value "${@:3}"
    [[ $4 =~ $2 ]] || fail "$3 is '$4', expected $1" 2
}

job_variables="MODEL TRAIN_ITERS MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_FLAGS TP PP CP RANKS_PER_NODE DATA_PATH VOCAB_FILE
    MERGE_FILE TOKENIZER_MODEL RUN_DIR SAVE_INTERVAL MASTER_PORT CONTAINER_IMAGE CONTAINER_MOUNTS CONDA_ENV VENV MEGASCAN_PYTHON MODULES
    INPUT OUTPUT_PREFIX PREPROCESS_FLAGS AGGREGATE_FLAGS"
nodes=2 gpus=4 time=01:00:00 name=megascan preprocess=false dry_run=${MEGASCAN_DRY_RUN:-} more=()
while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    case $1 in
    -h | --help) show_help ;;
    --dry-run) dry_run=1 && shift ;;
    --preprocess) preprocess=true && shift ;;
    --nodes) need_value "$@" && need_whole "$1" "$2" && nodes=$2 && shift 2 ;;
    --gpus-per-node) need_value "$@" && need_whole "$1" "$2" 0 && gpus=$2 && shift 2 ;;
    --time) need_match "an HH:MM:SS" '^([0-9]+-)?[0-9]{1,3}(:[0-9]{2}){1,2}$' "$@" && time=$2 && shift 2 ;;
    --name) need_match "letters, digits, dots, - and _" '^[0-9A-Za-z._-]+$' "$@" && name=$2 && shift 2 ;;
    --) more=("${@:2}") && break ;;
    *) fail "unknown option '$1'; see --help, and put options of sbatch after --" 2 ;;
    esac
done

check_layout() {
    local ranks=$((nodes * gpus)) replica=$((${TP:-1} * ${PP:-1} * ${CP:-1})) share
    ((gpus)) || ranks=$((nodes * ${RANKS_PER_NODE:-4}))
    [[ -z ${RANKS_PER_NODE:-} ]] || ((gpus == 0 || RANKS_PER_NODE <= gpus)) ||
        fail "RANKS_PER_NODE is $RANKS_PER_NODE and a node of this job has $gpus GPUs; ask for fewer ranks or more GPUs"
    [[ -z ${RANKS_PER_NODE:-} ]] || ranks=$((nodes * RANKS_PER_NODE))
    ((ranks % replica == 0)) ||
        fail "$ranks ranks cannot be split into replicas of TP ${TP:-1} x PP ${PP:-1} x CP ${CP:-1} = $replica ranks; change one of these"
    [[ -n ${TP:-} && -n ${GLOBAL_BATCH_SIZE:-} && -n ${MICRO_BATCH_SIZE:-} ]] || return 0
    share=$((MICRO_BATCH_SIZE * ranks / replica))
    ((GLOBAL_BATCH_SIZE % share == 0)) ||
        fail "GLOBAL_BATCH_SIZE $GLOBAL_BATCH_SIZE is not divisible by $share, MICRO_BATCH_SIZE $MICRO_BATCH_SIZE x $((ranks / replica)) replicas; change one of these"
}

check_data() {
    local file
    if $preprocess; then
        [[ -n ${INPUT:-} && -n ${OUTPUT_PREFIX:-} ]] || fail "--preprocess needs INPUT and OUTPUT_PREFIX in the environment" 2
        [[ -z ${DATA_PATH:-} ]] || fail "--preprocess makes the data itself; leave DATA_PATH out" 2
        for file in $INPUT; do need_path INPUT "$file"; done
        read_tokenizer
    elif [[ -n ${DATA_PATH:-} ]]; then
        [[ -f $DATA_PATH.bin && -f $DATA_PATH.idx ]] || fail "there is no $DATA_PATH.bin with $DATA_PATH.idx; make them with --preprocess"
        read_tokenizer
    else
        [[ -z ${VOCAB_FILE:-}${MERGE_FILE:-}${TOKENIZER_MODEL:-} ]] ||
            fail "a tokenizer is given and no data; set DATA_PATH, or leave the tokenizer out for mock data" 2
    fi
}

# shellcheck disable=SC2016 # what the jobs' numbers are is known when the commands run
plan() { # the commands as text: --dry-run prints them, otherwise bash runs them
    local after='' extra='' variable folder="runs/$name-\${run%%;*}"
    [[ ${#more[@]} == 0 ]] || printf -v extra ' %q' "${more[@]}"
    [[ -z ${RUN_DIR:-} ]] || printf -v folder %q "$RUN_DIR"
    printf 'cd %q && mkdir -p logs\n' "$PWD"
    for variable in $job_variables; do
        [[ -z ${!variable:-} ]] || printf 'export %s=%q\n' "$variable" "${!variable}"
    done
    if $preprocess; then
        printf 'preprocess=$(sbatch --parsable --job-name=%s%s scripts/slurm/preprocess.slurm)\n' "$name-preprocess" "$extra"
        printf 'export DATA_PATH=%q\n' "$OUTPUT_PREFIX"_text_document
        after=' --dependency=afterok:${preprocess%%;*}'
    fi
    printf 'run=$(sbatch --parsable --job-name=%s --nodes=%s --gpus-per-node=%s --time=%s%s%s scripts/slurm/run.slurm)\n' \
        "$name" "$nodes" "$gpus" "$time" "$after" "$extra"
    printf 'export RUN_DIR=%s\n' "$folder"
    printf 'aggregate=$(sbatch --parsable --job-name=%s --dependency=afterany:${run%%%%;*}%s scripts/slurm/aggregate.slurm)\n' \
        "$name-aggregate" "$extra"
    printf 'echo "submitted jobs ${preprocess:+$preprocess }$run $aggregate; next: tail -F logs/%s-${run%%%%;*}.out"\n' "$name"
    printf 'echo "the verdict will be in logs/%s-${aggregate%%%%;*}.out, the timeline in $RUN_DIR"\n' "$name-aggregate"
}

check_settings
check_software
[[ -z ${VENV:-} || -x $VENV/bin/python ]] || fail "VENV is $VENV, and there is no $VENV/bin/python; name a virtual environment"
check_layout
check_data
plan_text=$(plan)
if [[ -n $dry_run ]]; then
    echo "$plan_text"
    exit
fi
command -v sbatch >/dev/null || fail "sbatch is not on the PATH; run this on a login node of a Slurm cluster"
bash -euo pipefail -c "$plan_text" || fail "sbatch refused the job; see its message above"
