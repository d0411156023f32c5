#!/usr/bin/env bash
# The quickstart's task over two nodes: trainer ranks and a vLLM server on both, without GPUs.
#
#   sbatch launch/run_tiny.sh [KEY=VALUE ...]
#   bash launch/run_tiny.sh --dry-run
#SBATCH --job-name=run_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[ -e "$here/slurm_lib.sh" ] || # SLURM runs a copy
    here=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n '/^ *Command=/{s///;s/ .*//;p;q}')")
# shellcheck source=launch/slurm_lib.sh
. "$here/slurm_lib.sh"

export MCORE_RL_RANKS_PER_NODE=${MCORE_RL_RANKS_PER_NODE:-1}
run_job recipe=tiny_two_nodes "$@"
