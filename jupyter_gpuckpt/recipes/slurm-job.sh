#!/bin/bash
# A job of Slurm that is saved when it is stopped, and goes on where it was when Slurm starts it again
#SBATCH --job-name=train
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

# Nothing may come after this line: `exec` puts the command in the place of this script, so that Slurm's signals reach it.
# "train" names what goes on: two jobs that run at once need two names, those of an array train-$SLURM_ARRAY_TASK_ID.
exec jupyter gpuckpt run train -- python -u train.py
