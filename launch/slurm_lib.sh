# shellcheck shell=bash
# What every launch script does, from top to bottom: run_job. A launcher has three functions more:
# find_nodes, on_first_node and on_all_nodes; those of SLURM are here, others in local.sh and hosts.sh.
#
#   MCORE_RL_OBJECT_STORE_BYTES=8589934592  shared memory of a node's Ray; without it, 512 MiB
#   MCORE_RL_INTERFACE=eth0      the network that nodes meet on; without it, that of the default route
#   MCORE_RL_FIRST_PORT=20000    the first of 256 ports; without it, derived from the number of the job
#   MCORE_RL_RANKS_PER_NODE=4    CPU lane: devices that a node stands for; without it, its cores
#   MCORE_RL_NODES_S=120         how long nodes may take to come; without it, 120 s and 2 s a node
#   MCORE_RL_IMAGE=FILE          a container with mcore_rl's packages: by pyxis where srun has it, else
#                                by apptainer; MCORE_RL_MOUNTS=/data,... is mounted, too
#   MCORE_RL_PYTHON=...          the interpreter; without it, .venv/bin/python, in an image python3
#   MCORE_RL_DOCTOR=0            do not examine the nodes first
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
. "$root/launch/environment.sh"
# shellcheck source=launch/requeue.sh
. "$root/launch/requeue.sh"
SAVED=75 BAD_INPUT=2 # exit statuses of the driver: start it again with resume=auto; do not
NUM_PORTS=256

run_job() { # run_job [--dry-run] [--job=sft] KEY=VALUE...; without --job, mcore-rl rl
    read_settings "$@"
    if [ -n "$dry_run" ]; then
        show_job
        return
    fi
    check_memory # first: a run that is refused was no attempt
    open_logs
    trap 'note_signal USR1; was_warned=1' USR1
    trap 'note_signal TERM; note_end_of_time || is_cancelled=1' TERM
    trap 'note_signal INT; is_cancelled=1' INT
    check_nodes
    start_ray
    run_driver
    stop_all
    end_or_requeue
}

# --- settings -------------------------------------------------------------------------------------

read_settings() {
    local argument
    dry_run='' output='' overrides=() has_resume='' driver_pid='' ray_pid='' status=''
    is_cancelled='' was_asked='' was_warned='' is_noted='' by_srun='' model='' num_nodes='' memory_options=() command=rl
    for argument; do
        case $argument in
            --dry-run) dry_run=1 ;;
            --ignore-memory) memory_options=(--ignore-memory) ;;
            --job=*) command=${argument#--job=} ;;
            --nodes=*) num_nodes=${argument#--nodes=} ;;
            output_dir=*) output=${argument#output_dir=} ;;
            *) overrides+=("$argument") ;;
        esac
        case $argument in
            resume=*) has_resume=1 ;;
            model.path=*) model=${argument#model.path=} ;;
        esac
    done
    [ -z "$num_nodes" ] || [ -n "$dry_run" ] || die "--nodes is for --dry-run; a job: sbatch --nodes=$num_nodes $0"
    [ -n "$has_resume" ] || overrides+=(resume=auto)
    job=${SLURM_JOB_ID:-$$}
    # SLURM runs a copy of $0. Without SLURM the time tells runs apart: processes of containers have
    # the same few numbers, and a run would go on with an old one.
    output=${output:-outputs/${SLURM_JOB_NAME:-$(basename "$0" .sh)}-${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}}
    case $output in /*) ;; *) output=$root/$output ;; esac
    if [ -n "${MCORE_RL_IMAGE:-}" ]; then
        python=${MCORE_RL_PYTHON:-python3}
    else
        python=${MCORE_RL_PYTHON:-$root/.venv/bin/python}
        [ -x "$python" ] || die "$python is not there; on a machine that shares $root with the" \
            "nodes run launch/setup_env.sh, or set MCORE_RL_PYTHON or MCORE_RL_IMAGE"
    fi
    case $command in
        rl | sft | dpo | rm) ;;
        *) die "--job=$command; allowed: rl, sft, dpo, rm" ;;
    esac
    [[ ${num_nodes:-1} =~ ^[1-9][0-9]{0,4}$ ]] || die "--nodes=$num_nodes; allowed: a whole number from 1"
    check_number MCORE_RL_FIRST_PORT 1024 $((65536 - NUM_PORTS))
    check_number MCORE_RL_NODES_S 1 86400
    check_number MCORE_RL_RANKS_PER_NODE 0 9999
    check_number MCORE_RL_OBJECT_STORE_BYTES 0 $((1 << 50))
    # Below the usual ephemeral range, so that no connection has taken one (the doctor looks at that of
    # each node), and apart from other jobs'. When a job is queued again, others: something may listen
    # on those of before for ever.
    port=${MCORE_RL_FIRST_PORT:-$((10000 + NUM_PORTS * ((job + 31 * ${SLURM_RESTART_COUNT:-0}) % 88)))}
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    find_nodes
    find_image
    limit_s=${MCORE_RL_NODES_S:-$((120 + 2 * ${#nodes[@]}))}
}

check_number() { # NAME LEAST MOST: of a variable, where it is set
    local value=${!1:-$2}
    if ! [[ $value =~ ^[1-9][0-9]{0,17}$|^0$ ]] || [ "$value" -lt "$2" ] || [ "$value" -gt "$3" ]; then
        die "$1 is '$value'; allowed: a whole number from $2 to $3"
    fi
}

set_first_commands() { # what looks at the nodes
    doctor=("$python" -m mcore_rl.cli.main doctor --quiet --output-dir "$output" --mark "$logs")
    doctor+=(--timeout "$limit_s" --interface "${MCORE_RL_INTERFACE:-}")
    doctor+=(--ports "$port-$((port + NUM_PORTS - 1))")
    # A path that is not here is a wrong setting, and no node's fault: the driver says so.
    if [ -e "$model/config.json" ]; then doctor+=(--model-path "$model"); fi
    address_command=("$python" -m mcore_rl.controller.node address)
    address_command+=(--interface "${MCORE_RL_INTERFACE:-}")
}

set_commands() { # what else runs on the nodes, once it is known where they meet
    hold_command=("$python" -m mcore_rl.controller.node hold --head "$head" --logs "$logs")
    hold_command+=(--interface "${MCORE_RL_INTERFACE:-}" --ranks "${MCORE_RL_RANKS_PER_NODE:--1}")
    hold_command+=(--object-store-bytes "${MCORE_RL_OBJECT_STORE_BYTES:-0}")
    wait_command=("$python" -m mcore_rl.controller.node wait --head "$head" --logs "$logs")
    wait_command+=(--names "$(joined "${nodes[@]}")" --seconds "$limit_s")
    driver_command=("$python" -m mcore_rl.cli.main "$command" "${overrides[@]}" output_dir="$output")
}

# --- the phases -----------------------------------------------------------------------------------

open_logs() {
    local number=1
    mkdir -p "$output/logs" || die "$output/logs cannot be made; output_dir must be a folder that you may write to"
    # The folder is whose mkdir makes it: another job may start at the same moment.
    until mkdir "$output/logs/attempt_$number" 2>/dev/null; do
        [ -e "$output/logs/attempt_$number" ] || die "$output/logs cannot be written to"
        number=$((number + 1))
    done
    export MCORE_RL_ATTEMPT=$number
    if [ "$number" -gt 1 ]; then overrides=("${overrides[@]/#resume=*/resume=auto}"); fi
    logs=$output/logs/attempt_$number
    ln -sfn "attempt_$number" "$output/logs/latest"
    attempts=$output/logs/attempts.tsv before_status='' before_step=''
    if [ -e "$attempts" ]; then read -r _ before_status before_step < <(tail -n 1 "$attempts"); fi
    if [ "$before_status" = started ]; then before_step=$(last_step); fi # that script was killed
    note_attempt started "$(last_step)"
    # Every Ray port asks for this token, and only this user can read it.
    unset RAY_AUTH_TOKEN # it would come before the file
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/.token
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    phase "attempt $number on ${nodes[*]}; to follow it: python3 $(printf '%q ' "$root/launch/follow.py" "$output")"
    env | grep -E "$NETWORKS" | sort || true
    ulimit -Sn "$(ulimit -Hn)" || true
}

check_memory() { # of a GPU, where MCORE_RL_HARDWARE says which; before anything is started
    local plan=("$python" -m mcore_rl.cli.main plan memory "--job=$command" "${overrides[@]}")
    if [ -z "${MCORE_RL_HARDWARE:-}" ] || [ ${#memory_options[@]} -gt 0 ]; then return; fi
    phase 'plan the memory'
    on_first_node "${plan[@]}" "--hardware=$MCORE_RL_HARDWARE" ||
        die "the run does not fit $MCORE_RL_HARDWARE, or cannot be planned: see above; --ignore-memory goes on"
}

check_nodes() {
    phase 'check the nodes'
    set_first_commands
    [ "${MCORE_RL_DOCTOR:-1}" = 0 ] || examine_nodes || fail 'the nodes are not fit for a run'
    head_address=$(on_first_node "${address_command[@]}") || fail "${nodes[0]} cannot run $python"
    head=$head_address:$port
    set_commands
}

start_ray() {
    phase "start Ray at $head"
    pipe=$(mktemp -u "${TMPDIR:-/tmp}/mcr_pipe_XXXXXX")
    mkfifo -m 600 "$pipe"
    on_all_nodes "${hold_command[@]}" <"$pipe" &
    ray_pid=$!
    exec 3>"$pipe" # when this script is gone, however it went, so is the writer: Ray ends
    rm "$pipe"
    on_first_node "${wait_command[@]}" 3>&- &
    local wait_pid=$!
    while kill -0 "$wait_pid" 2>/dev/null; do
        # What a node's Ray has failed of, the other command tells.
        if ! kill -0 "$ray_pid" 2>/dev/null && ! compgen -G "$logs/*.failed" >/dev/null; then
            kill "$wait_pid" 2>/dev/null || true
            fail "no node runs Ray: what was to start it has ended, for the reason above or in $logs/node-*.log"
        fi
        if [ -n "$was_asked" ]; then
            kill "$wait_pid" 2>/dev/null || true
            return
        fi
        sleep 0.2
    done
    wait "$wait_pid" || fail "Ray did not start"
}

run_driver() {
    if [ -n "$was_asked" ]; then # before there was a driver to tell
        status=$SAVED
        return
    fi
    phase 'run the driver'
    set +e
    RAY_ADDRESS=$head on_first_node "${driver_command[@]}" \
        > >(trap '' INT TERM USR1; exec tee -a "$logs/driver.log" 3>&-) 2>&1 3>&- &
    driver_pid=$!
    watch_ray 3>&- &
    watcher_pid=$!
    wait_for "$driver_pid"
    driver_pid=''
    kill "$watcher_pid" 2>/dev/null
    set -e
    phase "the driver has ended with status $status"
}

stop_all() {
    exec 3>&-
    if [ -n "$ray_pid" ]; then
        phase 'stop Ray'
        wait_at_most 30 "$ray_pid" || kill -KILL "$ray_pid" 2>/dev/null || true
        wait "$ray_pid" 2>/dev/null || true
        on_all_nodes "$python" -m mcore_rl.controller.node sweep </dev/null & # a lost node hangs it
        wait_at_most 30 $! || phase 'not every node could be swept; the next start on it does'
    fi
    rm -f "$RAY_AUTH_TOKEN_PATH"
}

end_or_requeue() {
    [ -n "$is_noted" ] || note_end
    exit "$status"
}

note_end() { # and start again, unless this is how it ended before, without a step in between
    local step
    step=$(last_step)
    is_noted=1
    note_attempt "$status" "$step"
    if [ -n "$is_cancelled" ]; then return; fi
    case $status in
        0 | "$BAD_INPUT") return ;;
        "$SAVED") ;; # as did the one before, if a step takes longer than a job may
        *) case $before_status in 0 | "$BAD_INPUT" | "$SAVED") before_status='' ;; esac ;;
    esac
    if [ -n "$before_status" ] && [ "$step" = "$before_step" ]; then
        phase "ended twice after step $step; not started again: see $logs"
    else
        start_again
    fi
}

note_attempt() { # STATUS STEP
    printf '%s\t%s\t%s\n' "$MCORE_RL_ATTEMPT" "$1" "$2" >>"$attempts"
}

note_end_of_time() { # false for a job that is cancelled; what is left is KillWait, so not a step
    [ -z "$is_noted" ] || return 0
    [ -n "$was_warned" ] && is_out_of_time || return 1
    phase 'the time limit has come; the run goes on from its last checkpoint'
    if [ -n "$driver_pid" ] || [ -z "$status" ]; then status=$SAVED; fi
    note_end
}

# --- what the phases are made of ------------------------------------------------------------------

phase() { printf '%s [%4d s] %s\n' "$(date +%FT%T)" "$SECONDS" "$*"; }

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

fail() { # before the driver: what is wrong with the nodes or their Ray has been told
    status=1
    if [ -n "$is_cancelled" ]; then status=143; fi
    phase "$*"
    stop_all
    end_or_requeue
}

joined() { local IFS=,; echo "$*"; }

note_signal() { # the driver saves and ends; srun passes USR1 on, and ends a step for others
    was_interrupted=1 was_asked=1
    phase "SIG$1"
    [ -z "$driver_pid" ] || kill -s USR1 "$driver_pid" 2>/dev/null || true
}

wait_for() { # PID: sets status; a signal that is passed on does not end the wait
    status=0
    while :; do
        was_interrupted=''
        wait "$1"
        status=$?
        [ -n "$was_interrupted" ] || return 0
    done
}

wait_at_most() { # SECONDS PID
    local end=$((SECONDS + $1))
    while kill -0 "$2" 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}

watch_ray() { # a driver whose Ray is gone tells so itself, or is ended; what it makes of other nodes is its own matter
    local head_failed=$logs/${nodes[0]}.failed file
    local -A told
    trap - TERM INT USR1
    while kill -0 "$ray_pid" 2>/dev/null && [ ! -e "$head_failed" ]; do
        for file in "$logs"/*.failed; do
            if [ ! -s "$file" ] || [ -n "${told[$file]:-}" ] || [ "$file" = "$head_failed" ]; then continue; fi
            told[$file]=1
            phase "Ray has ended on $(basename "$file" .failed); the driver goes on if it can: $(cat "$file")"
        done
        sleep 1
    done
    phase "the driver's Ray has ended: $(cat "$head_failed" 2>/dev/null || echo "see $logs/node-*.log")"
    for signal in TERM KILL; do
        if wait_at_most 60 "$driver_pid"; then return; fi
        kill -s "$signal" "$driver_pid"
    done
}

last_step() { # the step that was trained last, as metrics.jsonl has it; '-' for none
    local step=''
    if [ -e "$output/metrics.jsonl" ]; then
        step=$(tail -n 1 "$output/metrics.jsonl" | sed -n 's/.*"step": *\([0-9]*\).*/\1/p')
    fi
    echo "${step:--}"
}

show_job() {
    logs=$output/logs/attempt_N head=${nodes[0]}:$port
    set_first_commands
    set_commands
    show_plan
    echo
    echo "nodes: ${nodes[*]}"
    if [ "${MCORE_RL_DOCTOR:-1}" != 0 ]; then echo "check: $(examine_nodes)"; fi
    echo "address: $(on_first_node "${address_command[@]}")"
    echo "Ray, on each node: $(on_all_nodes "${hold_command[@]}")"
    echo "wait: $(on_first_node "${wait_command[@]}")"
    echo "driver: RAY_ADDRESS=$head $(RAY_ADDRESS=$head on_first_node "${driver_command[@]}")"
    echo "end: $(on_all_nodes "$python" -m mcore_rl.controller.node sweep)"
}

show_plan() {
    local gpus plan=("${driver_command[@]}" --dry-run "${memory_options[@]}")
    if [ -n "${MCORE_RL_HARDWARE:-}" ]; then plan+=("--hardware=$MCORE_RL_HARDWARE"); fi
    gpus=$(sed -n 's/^#SBATCH --gpus-per-node=//p' "$0")
    if [ -n "$gpus" ]; then plan+=(--gpus-per-node="$gpus" --num-nodes=${#nodes[@]}); fi
    if [ ${#container[@]} -eq 0 ]; then
        "${in_image[@]}" "${plan[@]}"
    elif [ -n "${SLURM_JOB_ID:-}" ]; then
        dry_run='' on_first_node "${plan[@]}"
    else
        echo 'the plan: in a job alone (salloc), since pyxis has the packages there'
    fi
}

run() { # the command, or with --dry-run what it is
    if [ -n "$dry_run" ]; then
        printf '%q ' "$@"
        echo
    elif [ "$BASHPID" != "$$" ]; then
        exec "$@" # in a subshell, which so has its pid, and gets the signals that are for it
    else
        "$@"
    fi
}

# --- SLURM ----------------------------------------------------------------------------------------

find_nodes() {
    local listed
    by_srun=1
    if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        listed=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol does not answer"
        mapfile -t nodes <<<"$listed"
    elif [ -n "$dry_run" ]; then
        mapfile -t nodes < <(planned_nodes)
    else
        die "this is a job of SLURM's: sbatch $0 ...; without SLURM use launch/local.sh or launch/hosts.sh"
    fi
}

planned_nodes() { # as many as are asked for, or else as the script asks for
    local count=${num_nodes:-${SLURM_JOB_NUM_NODES:-}}
    [ -n "$count" ] || count=$(sed -n 's/^#SBATCH --nodes=\([0-9]*\).*/\1/p' "$0")
    for ((i = 0; i < ${count:-1}; i++)); do echo "node$i"; done
}

step() { # a step of srun's beside the others, one task a node; one that ends does not end the others
    local image=("${container[@]}") names
    if [ -n "$keeps_variables" ]; then
        mapfile -t names < <(over_image)
        image+=(--container-env="$(joined "${names[@]}")")
    fi
    run srun --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none --export=ALL \
        --ntasks-per-node=1 "${image[@]}" "$@"
}

on_first_node() {
    step --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --input=none "${in_image[@]}" "$@"
}

on_all_nodes() { step --nodes=${#nodes[@]} --ntasks=${#nodes[@]} "${in_image[@]}" "$@"; }

examine_nodes() {
    if [ -n "${MCORE_RL_IMAGE:-}" ]; then
        on_all_nodes "${doctor[@]}" --on=this </dev/null
    else
        run "${doctor[@]}" --on=slurm
    fi
}
