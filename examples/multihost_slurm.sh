#!/usr/bin/env bash
# Trains on several hosts under Slurm:
#
#     sbatch examples/multihost_slurm.sh examples/train_gpt.py --checkpoints runs/gpt
#
# Each GPU has a process; zerojax.initialize() in the program finds the others.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
# Slurm sends SIGTERM to the processes 120 s before the allocation ends. `Checkpoints.save` then
# saves and ends them with status 143. The job goes back to the queue, and resumes.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -u "$@" && status=0 || status=$?
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
