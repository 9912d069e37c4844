#!/usr/bin/env bash
# Overlap and CUDA graphs of the Megatron engine with and without, on two GPUs of 80 GB: one part in a few minutes.
#
#     bash benchmarks/overlap.sh PART OUTPUT     PART: graphs, tp, tp-dp, ep, ep-auto, equal; rows go to OUTPUT.jsonl
#
# graphs   1.7B on one GPU, a step of many tokens and one of few, side by side
# tp       8B's shape in 20 layers, TP2 + SP with and without userbuffers, beside megatron-core's own model
# tp-dp    8B's shape in 14 layers, as many tokens a GPU: TP2 + SP with and without, then DP2
# ep       7B-A1B's shape in 10 layers, EP2, four micro-batches: with and without, by the router and balanced
# ep-auto  the same with the dispatcher that --moe-dispatcher auto takes
# equal    numbers, not speed: every layout and run that these options have
set -eu
cd "$(dirname "$0")/.."
part=$1 output=$2
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
export UB_SKIPMC=${UB_SKIPMC:-1}  # userbuffers by CUDA IPC; 0: by NVLink multicast
python=${PYTHON:-python}
sides=(--only without --only ours)
ep=(--model moe --layers 10 --micro-batch-size 2 --micro-batches 4 --ep 2)

one() { # a GPU, then options
    local gpu=$1
    shift
    CUDA_VISIBLE_DEVICES=$gpu timeout 260 "$python" benchmarks/train.py --json "$output.jsonl" --steps 20 "$@"
}

two() { # the number of hardware queues, then options
    local connections=$1
    shift
    CUDA_DEVICE_MAX_CONNECTIONS=$connections timeout 260 "$python" -m torch.distributed.run --standalone \
        --nproc-per-node 2 benchmarks/train.py --json "$output.jsonl" "$@"
}

case $part in
graphs)
    one 0 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 4 &
    one 1 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 1 --seq-length 1024 --micro-batches 8
    one 1 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 1 --micro-batches 4
    wait
    ;;
tp)
    two 1 --model 8b --layers 20 --micro-batch-size 2 --tp 2 --tp-overlap "${sides[@]}" --only peer
    two 1 --model 8b --layers 20 --micro-batch-size 2 --tp 2 --tp-overlap "${sides[@]}" --precision fp8
    ;;
tp-dp)
    two 1 --model 8b --layers 14 --micro-batch-size 4 --tp 2 --tp-overlap "${sides[@]}"
    two 1 --model 8b --layers 14 --micro-batch-size 2 --only ours
    ;;
ep)
    two 32 "${ep[@]}" --ep-overlap "${sides[@]}"
    two 32 "${ep[@]}" --ep-overlap "${sides[@]}" --balanced
    ;;
ep-auto)
    two 32 "${ep[@]}" --set moe_dispatcher=auto --only ours
    ;;
equal)
    "$python" benchmarks/layouts/all_gpus.py --output "$output" --seconds 420 --parts '^(cells2_0|runs_0)$'
    ;;
*)
    echo "unknown part $part" >&2
    exit 2
    ;;
esac
