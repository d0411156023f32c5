#!/usr/bin/env bash
# A job on this machine alone, as launch/slurm_lib.sh has it: examined first, logs by attempt, resumed.
#
#   bash launch/local.sh recipe=quickstart [KEY=VALUE ...]
#   bash launch/local.sh --dry-run recipe=quickstart
set -euo pipefail
# shellcheck source=launch/slurm_lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm_lib.sh"

find_nodes() { nodes=("$(hostname -s)"); }
on_first_node() { run env MCORE_RL_NODE="${nodes[0]}" "${in_image[@]}" "$@"; }
on_all_nodes() { on_first_node "$@"; }
examine_nodes() { on_first_node "${doctor[@]}" --on=this; }
start_again() { phase "to go on: the same command with output_dir=$output"; }

run_job "$@"
