#!/usr/bin/env bash
# From a bare checkout to a named slow rank: installs, builds a small real corpus, trains a GPT on it with one rank
# made slow, merges the traces and prints the verdict.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/messages.sh"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage="usage: bash scripts/quickstart.sh [options]

  --healthy         make no rank slow: nobody must be accused
  --rank R          the rank to slow down (default: 5 of 8; on 4 GPUs: 2)
  --factor F        how much slower its compute becomes (default: 1.5)
  --tp N --pp N --dp N   layout (default: 2 x 2 x 2 on the CPU)
  --iterations N    iterations to train (default: 30)
  -o, --output DIR  where everything goes (default: quickstart_output)
  -h, --help        this text

GPUs are used when there are at least four; otherwise every rank is a process on the CPU."

healthy=false rank='' factor='' tp='' pp='' dp='' iterations=30 output=quickstart_output
while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    case $1 in
    -h | --help) show_help ;;
    --healthy) healthy=true && shift && continue ;;
    --rank) need_value "$@" && need_whole "$1" "$2" 0 && rank=$2 ;;
    --factor) need_value "$@" && factor=$2
        [[ $2 =~ ^[0-9]+(\.[0-9]+)?$ && ! $2 =~ ^0+(\.|$) ]] || fail "--factor is '$2', expected a number from 1 on, like 1.5" 2 ;;
    --tp) need_value "$@" && need_whole "$1" "$2" 1 64 && tp=$2 ;;
    --pp) need_value "$@" && need_whole "$1" "$2" 1 64 && pp=$2 ;;
    --dp) need_value "$@" && need_whole "$1" "$2" 1 64 && dp=$2 ;;
    --iterations) need_value "$@" && need_whole "$1" "$2" && iterations=$2 ;;
    -o | --output) need_value "$@" && output=$2 ;;
    *) fail "unknown option '$1'; see --help" 2 ;;
    esac
    shift 2
done
! $healthy || [[ -z $rank$factor ]] || fail "--healthy makes no rank slow; leave --rank and --factor out" 2
need_folder --output "$output"
output=$(realpath -m -- "$output") factor=${factor:-1.5}

prepare_environment train
"$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' ||
    fail "$PYTHON has no torch: install MegaScan with the extra train there, or unset MEGASCAN_PYTHON"

num_gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [[ $num_gpus -ge 4 ]]; then
    place="$num_gpus GPUs" tp=${tp:-2} pp=${pp:-1} dp=${dp:-2}
    layers=8 heads=32
    model=(--num-layers "$layers" --hidden-size 4096 --num-attention-heads "$heads" --seq-length 2048
        --micro-batch-size 2 --bf16 --distributed-backend nccl)
else
    place="the CPU" tp=${tp:-2} pp=${pp:-2} dp=${dp:-2}
    layers=4 heads=4
    model=(--num-layers "$layers" --hidden-size 256 --num-attention-heads "$heads" --seq-length 128
        --micro-batch-size 2 --distributed-backend gloo)
fi
world=$((tp * pp * dp))
rank=${rank:-$((world * 5 / 8))}
((rank < world)) || fail "--rank is $rank, expected 0 to $((world - 1)) for $tp x $pp x $dp ranks" 2
global=$((2 * dp * 4)) # micro-batches of 2 sequences, 4 of them a replica
[[ $place == "the CPU" ]] || ((world <= num_gpus)) ||
    fail "$tp x $pp x $dp are $world ranks and this machine has $num_gpus GPUs; choose a smaller layout"
((heads % tp == 0)) || fail "--tp is $tp, which does not divide the model's $heads attention heads"
((layers % pp == 0)) || fail "--pp is $pp, which does not divide the model's $layers layers"

echo "== 1/4 corpus and tokenizer" >&2
corpus=$output/corpus
if [[ ! -f $corpus/corpus_text_document.idx ]]; then
    "$PYTHON" -m training.sample_corpus -o "$corpus" --force >&2
    "$PYTHON" -m training.preprocess_data --input "$corpus/corpus.jsonl" --output-prefix "$corpus/corpus" \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$corpus/vocab.json" --merge-file "$corpus/merges.txt" \
        --append-eod --workers 2 --force >&2
fi

fault=()
if $healthy; then
    echo "== 2/4 training on $place: TP$tp x PP$pp x DP$dp, every rank healthy" >&2
else
    fault=(--inject-fault "rank=$rank,kind=compute,factor=$factor")
    echo "== 2/4 training on $place: TP$tp x PP$pp x DP$dp, rank $rank computes $factor times slower" >&2
fi
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$world" -m training.pretrain_gpt \
    --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" \
    "${model[@]}" --max-position-embeddings 2048 --global-batch-size "$global" \
    --train-iters "$iterations" --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
    --data-path "$corpus/corpus_text_document" --split 949,50,1 --eval-interval 1000 --eval-iters 0 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$corpus/vocab.json" --merge-file "$corpus/merges.txt" \
    --num-workers 0 --log-interval 5 --transformer-impl local "${fault[@]}" \
    --trace --trace-dir "$output/trace" --trace-interval 5 --continuous-trace-iterations 2 >&2

echo "== 3/4 merging the ranks' traces and looking for the slow one" >&2
"$PYTHON" aggregate.py -b "$output/trace" -o "$output/timeline.json" --json "$output/verdict.json" -d --force

echo "== 4/4 done" >&2
cat <<DONE

The timeline is $output/timeline.json
Look at it:  $PYTHON -m megascan view $output/timeline.json
       or drop the file on ui.perfetto.dev
The findings as JSON are in $output/verdict.json; what was injected is in $output/trace/ground-truth.json.
DONE
