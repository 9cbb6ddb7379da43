#!/usr/bin/env bash
# Trains on several hosts under Slurm:
#
#     sbatch examples/multihost_slurm.sh examples/train_gpt.py --checkpoints runs/gpt
#
# One process per GPU; zerojax.initialize() in the program finds the others.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
# The processes get SIGTERM 120 s before the end of the allocation. `Checkpoints.save` then saves
# and ends them with status 143; the job goes back to the queue, and resumes.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -u "$@" && status=0 || status=$?
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
