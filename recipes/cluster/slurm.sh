#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# SIGTERM to the steps 120 seconds before the time is up: the run saves, exits 143, and is queued again.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -uo pipefail

# One process for each GPU; each finds the others from Slurm's variables.
srun --kill-on-bad-exit=1 telic launch train.py
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
