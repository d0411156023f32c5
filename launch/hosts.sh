#!/usr/bin/env bash
# A job on several machines without a batch system, over ssh; the first one has the driver.
#
#   MCORE_RL_HOSTS="a1 a2" bash launch/hosts.sh recipe=... [KEY=VALUE ...]
#   MCORE_RL_HOSTS="a1 a2" bash launch/hosts.sh --dry-run recipe=...
#
# ssh must log in without asking, and this folder and output_dir must be the same on all of them.
# MCORE_RL_SSH="ssh -p 2222" is another command than ssh.
set -euo pipefail
# shellcheck source=launch/slurm_lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm_lib.sh"

find_nodes() {
    read -r -a nodes <<<"${MCORE_RL_HOSTS:-}"
    [ ${#nodes[@]} -gt 0 ] || die "MCORE_RL_HOSTS names no host; set it to a list such as 'a1 a2'"
    read -r -a ssh <<<"${MCORE_RL_SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=10}"
}

there() { # NUMBER COMMAND...: with what tells a node who it is, and the variables that are passed on
    local number=$1 name variables=() quoted
    shift
    for name in $(passed_on); do variables+=("$name=${!name}"); done
    variables+=("MCORE_RL_NODE=${nodes[$number]}" "MCORE_RL_NODE_NUMBER=$number")
    printf -v quoted '%q ' cd "$root" && quoted+='&& exec '
    quoted+=$(printf '%q ' env "${variables[@]}" "${in_image[@]}" "$@")
    run "${ssh[@]}" "${nodes[$number]}" "$quoted"
}

on_first_node() { there 0 "$@" </dev/null; }

on_all_nodes() { # each gets its own end of the pipe; the status is the worst
    local number pids=() pid worst=0 words
    exec {words}<&0
    for number in "${!nodes[@]}"; do
        there "$number" "$@" <&"$words" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
    return "$worst"
}

examine_nodes() { on_all_nodes "${doctor[@]}" --on=this </dev/null; }

start_again() { phase "to go on: the same command with output_dir=$output"; }

run_job "$@"
