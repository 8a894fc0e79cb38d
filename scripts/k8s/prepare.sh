#!/usr/bin/env bash
# Preprocesses the raw data before a training job, once: a JobSet that starts again finds it done.
#
#   RAW_DATA, PREPARED_DATA   the .jsonl (packed or not), and the output's name without _text_document
#   PREPARE_WORKERS           processes
#   VOCAB_FILE and MERGE_FILE, or TOKENIZER_MODEL
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$checkout/scripts/lib/messages.sh"
source "$checkout/scripts/lib/settings.sh"

[[ -n ${RAW_DATA:-} && -n ${PREPARED_DATA:-} ]] || fail "RAW_DATA and PREPARED_DATA are not set; see scripts/k8s/components/real-data" 2
if [[ -f ${PREPARED_DATA}_text_document.idx && ! -d $PREPARED_DATA.partial ]]; then
    echo "${PREPARED_DATA}_text_document is there already; remove it to have it made again"
    exit 0
fi
need_whole PREPARE_WORKERS "${PREPARE_WORKERS:-1}"
need_path RAW_DATA "$RAW_DATA"
read_tokenizer
exec "${MEGASCAN_PYTHON:-python}" -m training.preprocess_data --input "$RAW_DATA" --output-prefix "$PREPARED_DATA" "${tokenizer[@]}" \
    --append-eod --workers "${PREPARE_WORKERS:-1}" --log-interval 100000
