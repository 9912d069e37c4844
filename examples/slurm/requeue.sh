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

srun_and_requeue() {
    local output=$1 before code=0
    shift
    before=$(saved_step "$output")
    # Since Slurm 22.05 srun does not take --cpus-per-task from the job.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
    # No trap: scancel ends this shell by SIGTERM, so that a cancelled job is not queued again. Preemption with a grace
    # time and --signal=TERM@SECONDS send SIGTERM to the tasks only.
    srun --kill-on-bad-exit=1 "$@" || code=$?
    # 75: the run saved and stopped. 143: SIGTERM came before its first step, or ended a rank that was already leaving.
    if [ "$code" -ne 75 ] && [ "$code" -ne 143 ]; then
        return "$code"
    fi
    if [ "$(saved_step "$output")" -gt "$before" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_IDLE_RESTARTS" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "no new checkpoint after $SLURM_RESTART_COUNT restarts: not queued again" >&2
    fi
    return "$code"
}
