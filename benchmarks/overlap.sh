#!/usr/bin/env bash
# Overlap and CUDA graphs of the Megatron engine with and without, on two GPUs of 80 GB: one part in a few minutes.
#
#     bash benchmarks/overlap.sh PART OUTPUT     PART: graphs, tp, tp-dp, ep, ep-auto, equal; rows go to OUTPUT.jsonl
#
# Each side prints a line when it is done, and ends after LIMIT seconds (120 by default) with the place where it was.
# What fails lets the rest go on, and the exit code be 1.
#
# graphs   1.7B on one GPU, a step of many tokens and one of few, side by side
# tp       8B's shape in 20 layers, TP2 + SP with and without userbuffers, beside megatron-core's own model
# tp-dp    8B's shape in 14 layers, as many tokens a GPU: TP2 + SP with and without, then DP2
# ep       7B-A1B's shape in 10 layers, EP2, four micro-batches: with and without, by the router and balanced
# ep-auto  the same with the dispatcher that --moe-dispatcher auto takes
# equal    numbers, not speed: every layout and run that these options have
set -u
cd "$(dirname "$0")/.."
part=$1 output=$2 limit=${LIMIT:-120} failed=0
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export UB_SKIPMC=${UB_SKIPMC:-1}  # userbuffers by CUDA IPC; 0: by NVLink multicast
python=${PYTHON:-python}
sides=(--only without --only ours)
ep=(--model moe --layers 10 --micro-batch-size 2 --micro-batches 4 --ep 2)

one() { # a GPU, then options
    local gpu=$1
    shift
    CUDA_VISIBLE_DEVICES=$gpu "$python" benchmarks/train.py --limit "$limit" --json "$output.jsonl" --steps 20 "$@"
}

two() { # the number of hardware queues, then options
    local connections=$1
    shift
    CUDA_DEVICE_MAX_CONNECTIONS=$connections timeout --kill-after 5 $((3 * limit)) \
        "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
        benchmarks/train.py --limit "$limit" --json "$output.jsonl" "$@"
}

case $part in
graphs)
    one 0 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 4 &
    other=$!
    one 1 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 1 --seq-length 1024 --micro-batches 8 || failed=1
    one 1 --model 1.7b --cuda-graphs "${sides[@]}" --micro-batch-size 1 --micro-batches 4 || failed=1
    wait $other || failed=1
    ;;
tp)
    two 1 --model 8b --layers 20 --micro-batch-size 2 --tp 2 --tp-overlap "${sides[@]}" --only peer || failed=1
    two 1 --model 8b --layers 20 --micro-batch-size 2 --tp 2 --tp-overlap "${sides[@]}" --precision fp8 || failed=1
    ;;
tp-dp)
    two 1 --model 8b --layers 14 --micro-batch-size 4 --tp 2 --tp-overlap "${sides[@]}" || failed=1
    two 1 --model 8b --layers 14 --micro-batch-size 2 --only ours || failed=1
    ;;
ep)
    two 32 "${ep[@]}" --ep-overlap "${sides[@]}" || failed=1
    two 32 "${ep[@]}" --ep-overlap "${sides[@]}" --balanced || failed=1
    ;;
ep-auto)
    two 32 "${ep[@]}" --set moe_dispatcher=auto --only ours || failed=1
    ;;
equal)
    "$python" benchmarks/layouts/all_gpus.py --output "$output" --seconds 420 --parts '^(cells2_0|runs_0)$' || failed=1
    ;;
*)
    echo "unknown part $part" >&2
    exit 2
    ;;
esac
exit $failed
