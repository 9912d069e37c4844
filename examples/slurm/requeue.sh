# For batch scripts, in bash: start a run with srun, and queue the job again if the run stopped early.
#
#     source examples/slurm/requeue.sh
#     srun_and_requeue OUTPUT COMMAND...
#
# COMMAND has the options --resume and --stopped-exit-code 75.

# Restarts without a new checkpoint after which the job is not queued again.
MAX_IDLE_RESTARTS=5

# Step of the newest checkpoint, 0 without one.
saved_step() {
    local step
    step=$(sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p' "$1/status.json" 2>/dev/null)
    echo "${step:-0}"
}

# True if the run of this attempt stopped after a checkpoint.
saved_and_stopped() {
    grep -q '"state": "stopped"' "$1/status.json" 2>/dev/null && [ "$(saved_step "$1")" -gt "$2" ]
}

srun_and_requeue() {
    local output=$1 before code=0
    shift
    before=$(saved_step "$output")
    # Since Slurm 22.05 srun does not take --cpus-per-task from the job.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
    # No trap: scancel ends this shell by SIGTERM, so that a cancelled job is not queued again. Preemption with a grace
    # time and --signal=TERM@SECONDS send SIGTERM to the tasks only.
    # Ranks end each other. If srun did it (--kill-on-bad-exit=1), an error would look like SIGTERM, because srun exits
    # with the highest of their codes, and a rank that has saved would end others that have not. One that hangs is killed
    # 15 minutes after the first has ended.
    srun --kill-on-bad-exit=0 --wait=900 "$@" || code=$?
    # 75: the run saved and stopped. 143: SIGTERM came before its first step. Another code of a signal: a rank was killed
    # while it was leaving, so status.json decides.
    if [ "$code" -ne 75 ] && [ "$code" -ne 143 ] && { [ "$code" -le 128 ] || ! saved_and_stopped "$output" "$before"; }; then
        return "$code"
    fi
    if [ "$(saved_step "$output")" -gt "$before" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_IDLE_RESTARTS" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "no new checkpoint after $SLURM_RESTART_COUNT restarts: not queued again" >&2
    fi
    return "$code"
}
