#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on 2 nodes of 8 H100.
#
#   sbatch launch/run_qwen3_30b.sh model.path=FOLDER data.train_file=FILE data.test_file=FILE [KEY=VALUE ...]
#   bash launch/run_qwen3_30b.sh --dry-run model.path=FOLDER ...     the commands and the plan; starts nothing
#
# docs/cluster.md has the first run step by step. Partition, account and time are your cluster's:
# sbatch --partition=... --account=... --time=... launch/run_qwen3_30b.sh ...
#SBATCH --job-name=run_qwen3_30b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail
export MCORE_RL_HARDWARE=${MCORE_RL_HARDWARE:-h100} # the run is refused if it does not fit
here=$(dirname "${BASH_SOURCE[0]}")
[ -e "$here/slurm_lib.sh" ] || # SLURM runs a copy
    here=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=/{s///;s/ .*//;p;q}')")
# shellcheck source=launch/slurm_lib.sh
. "$here/slurm_lib.sh"

run_job recipe=qwen3_30b_a3b trainer.save_every=10 "$@"
