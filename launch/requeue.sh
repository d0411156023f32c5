# shellcheck shell=bash
# A job of SLURM's that is to start again, and on which nodes.
# shellcheck disable=SC2154 # slurm_lib.sh has set them

is_out_of_time() {
    [ -n "${SLURM_JOB_ID:-}" ] && [[ $(scontrol show job "$(this_job)") = *Reason=TimeLimit* ]]
}

this_job() { # the last task of an array has the array's number, by which SLURM would take all of them
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

start_again() { # nodes whose Ray has failed are left out, where the partition has others
    local bad needed=${#nodes[@]} others itself
    itself=$(this_job)
    bad=$(failed_nodes "$(scontrol show job "$itself" | sed -n 's/.*\bExcNodeList=\([^ ]*\).*/\1/p')")
    trap '' TERM USR1
    scontrol requeue "$itself"
    if [ -n "$bad" ]; then
        others=$(fit_nodes | grep -vcxF "$(tr , '\n' <<<"$bad")" || true)
        if [ "$others" -ge "$needed" ]; then
            if scontrol update JobId="$itself" ExcNodeList="$bad"; then
                phase "next time without $bad"
            else
                phase "$bad is not left out: scontrol update failed"
            fi
        else
            phase "$bad is not left out: $others other nodes of the $needed that it takes"
        fi
    fi
}

fit_nodes() { # of the partition; by --states=idle one that is drained would be listed, too
    sinfo --noheader --Node --responding --partition="$SLURM_JOB_PARTITION" --format='%N %t' |
        sed -nE 's/ +(idle|mix|alloc|comp|plnd)[~#-]?$//p'
}

failed_nodes() { # and those that are left out already, a list of SLURM's
    local file names=()
    if [ "$1" != '(null)' ]; then mapfile -t names < <(scontrol show hostnames "$1"); fi
    for file in "$logs"/*.failed; do
        if [ -e "$file" ]; then names+=("$(basename "$file" .failed)"); fi
    done
    joined "${names[@]}"
}
