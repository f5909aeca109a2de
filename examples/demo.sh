#!/bin/sh
# From a list of checkpoints to a shortlist, on a Hub that runs inside the command: no network, no downloads.
set -eu

run() {
    printf '\n$ %s\n' "$*"
    "$@" || status=$?
    # 3 (nothing kept) and 4 (some repos could not be judged) are answers; the catalogue holds repos that are gone.
    case ${status:-0} in 0 | 3 | 4) unset status ;; *) exit "$status" ;; esac
}

run screen --demo --max-size 200GiB --experts 512 --model-types qwen4_exp
run screen show --demo RadixArk/Qwen3.8-Flash-Next-NVFP4
