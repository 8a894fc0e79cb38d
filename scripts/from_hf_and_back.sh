#!/usr/bin/env bash
# The whole way of a model: a Hugging Face folder becomes a checkpoint, is trained here with traces, served, and goes back to
# Hugging Face, where transformers continues a text as it was learnt. On the CPU, with a small random model.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/messages.sh"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage="usage: bash scripts/from_hf_and_back.sh [options]

  --iterations N    iterations to train (default: 60)
  -o, --output DIR  where everything goes (default: from_hf_output)
  -h, --help        this text"

iterations=60 output=from_hf_output
while [[ $# -gt 0 ]]; do
    split_option "$@" && set -- "${words[@]}"
    case $1 in
    -h | --help) show_help ;;
    --iterations) need_value "$@" && need_whole "$1" "$2" && iterations=$2 ;;
    -o | --output) need_value "$@" && output=$2 ;;
    *) fail "unknown option '$1'; see --help" 2 ;;
    esac
    shift 2
done
need_folder --output "$output"
output=$(realpath -m -- "$output")
[[ ! -e $output/model ]] || fail "$output already has a model; give another --output"
prepare_environment train,serve
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The made-up data count upwards from number to number; the last of the model's ids ends a text.
num_ids=501

echo "== 1/6 a small random Llama, as Hugging Face keeps one" >&2
"$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/lib/random_llama.py" "$output/model" "$num_ids"

echo "== 2/6 into a checkpoint" >&2
"$PYTHON" -m training.convert --from-hf "$output/model" --save "$output/start" >&2

echo "== 3/6 training it on two ranks for $iterations iterations, traced" >&2
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m training.pretrain_gpt \
    --load "$output/start" --use-checkpoint-args --save "$output/trained" --tensor-model-parallel-size 2 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size $((num_ids - 1)) --seq-length 64 \
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$iterations" --lr 5e-3 --eval-iters 0 \
    --num-workers 0 --log-interval 20 --distributed-backend gloo \
    --trace --trace-dir "$output/trace" >&2
"$PYTHON" aggregate.py -b "$output/trace" -o "$output/timeline.json" -d --force

echo "== 4/6 serving it on two pipeline stages and asking" >&2
served=$("$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/lib/serve_and_ask.py" "1 2 3" 8 --load "$output/trained" \
    --pipeline-model-parallel-size 2 --distributed-backend gloo)
echo "the server continues 1 2 3 with $served"

echo "== 5/6 back to Hugging Face" >&2
check=(--check)
if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("transformers"))'; then
    check=()
fi
"$PYTHON" -m training.convert --load "$output/trained" --to-hf "$output/back" "${check[@]}"

echo "== 6/6 the same model in transformers" >&2
if [[ ${#check[@]} -eq 0 ]]; then
    note "$PYTHON has no transformers: $output/back is not loaded there"
    exit 0
fi
continued=$("$PYTHON" - "$output/back" <<'CONTINUE'
import sys

import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.tensor([[1, 2, 3]])
text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
print(*text[0, 3:].tolist())
CONTINUE
)
echo "transformers continues 1 2 3 with $continued"
[[ $continued == "$served" ]] || fail "the server and transformers continue 1 2 3 differently"
