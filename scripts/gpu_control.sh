#!/usr/bin/env bash
# Real clock limits on NVIDIA GPUs, to make one GPU slow on purpose and to undo it.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/messages.sh"

usage="usage: bash scripts/gpu_control.sh COMMAND

  limit ID MHZ   lock the graphics clock of GPU ID to at most MHZ (needs root)
  reset [ID]     take the limit off GPU ID, or off every GPU (needs root)
  monitor        print clocks, power, temperature and throttle reasons until Ctrl-C

Example: make GPU 0 slow, trace, find it, undo:
  sudo bash scripts/gpu_control.sh limit 0 900
  sudo bash scripts/gpu_control.sh reset 0"

need_nvidia_smi() {
    command -v nvidia-smi >/dev/null ||
        fail "nvidia-smi is not on the PATH; clock limits need an NVIDIA driver on this machine"
}

is_number() { [[ $1 =~ ^[0-9]+$ ]]; }

check_gpu() {
    is_number "$1" || fail "GPU id is '$1', expected a number; see nvidia-smi -L" 2
    local known
    known=$(nvidia-smi --query-gpu=index --format=csv,noheader) || fail "nvidia-smi cannot list the GPUs"
    grep -qx "$1" <<<"$known" || fail "there is no GPU $1 on this machine, found: $(tr '\n' ' ' <<<"$known")"
}

check_clock() {
    is_number "$2" || fail "clock limit is '$2', expected a number in MHz, for example 900" 2
    local highest
    highest=$(nvidia-smi -i "$1" --query-gpu=clocks.max.graphics --format=csv,noheader,nounits)
    if ! is_number "$highest"; then
        note "nvidia-smi does not tell the highest clock of GPU $1; $2 MHz is not checked"
    elif (($2 < 1 || $2 > highest)); then
        fail "clock limit is $2 MHz, expected 1 to $highest for GPU $1"
    fi
}

show() {
    nvidia-smi ${1:+-i "$1"} --query-gpu=index,name,clocks.current.graphics,clocks.max.graphics \
        --format=csv,noheader |
        sed 's/^/GPU /'
}

limit() {
    [[ $# == 2 ]] || fail "limit takes a GPU id and a clock in MHz, got $# arguments; for example: limit 0 900" 2
    need_nvidia_smi
    check_gpu "$1"
    check_clock "$1" "$2"
    nvidia-smi -i "$1" --lock-gpu-clocks="0,$2" >&2 || fail "nvidia-smi refused the limit; it needs root"
    show "$1"
    echo "GPU $1 is limited to $2 MHz; undo it with: bash scripts/gpu_control.sh reset $1"
}

reset() {
    [[ $# -le 1 ]] || fail "reset takes at most one GPU id, got $# arguments" 2
    need_nvidia_smi
    [[ $# == 0 ]] || check_gpu "$1"
    nvidia-smi ${1:+-i "$1"} --reset-gpu-clocks >&2 || fail "nvidia-smi refused the reset; it needs root"
    show "${1:-}"
    echo "clock limits are off for ${1:+GPU }${1:-every GPU}"
}

monitor() {
    [[ $# == 0 ]] || fail "monitor takes no arguments, got $#" 2
    need_nvidia_smi
    exec nvidia-smi --loop=1 --format=csv --query-gpu=index,clocks.current.graphics,clocks.max.graphics,power.draw,temperature.gpu,utilization.gpu,clocks_event_reasons.active
}

if is_one_of --help "$@" || is_one_of -h "$@"; then show_help; fi
case "${1:-}" in
limit | reset | monitor) "$@" ;;
help) show_help ;;
"") fail "no command, expected limit, reset or monitor; see --help" 2 ;;
*) fail "unknown command '$1', expected limit, reset or monitor; see --help" 2 ;;
esac
