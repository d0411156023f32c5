#!/usr/bin/env bash
# Set-up, every static gate, then the tests. Arguments go to pytest; the gates always run.
#
#   bash tests/run.sh
#   bash tests/run.sh -k advantages -x
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
bash launch/setup_env.sh || exit 1
export PATH="$root/.venv/bin:$PATH"

summary=()
failed=0

record() { # label, exit status, second it started
    local verdict=ok
    if [ "$2" -ne 0 ]; then
        verdict=FAILED
        failed=1
    fi
    summary+=("$(printf '%-16s %-7s %4d s' "$1" "$verdict" $((SECONDS - $3)))")
}

gate() { # label, command...: silent unless it fails
    local label=$1 start=$SECONDS output status
    shift
    output=$("$@" 2>&1)
    status=$?
    [ "$status" -eq 0 ] || printf '== %s\n%s\n\n' "$label" "$output"
    record "$label" "$status" "$start"
}

gate 'ruff check' ruff check .
gate 'ruff format' ruff format --check .
gate 'import layers' lint-imports --no-cache
gate 'sizes' python tests/check_sizes.py .
if command -v shellcheck >/dev/null; then
    gate 'shellcheck' shellcheck launch/*.sh tests/run.sh .ci/run
fi

start=$SECONDS
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT
# A single process for a dozen seconds: tests need not wait for it.
{
    mypy >"$logs/types" 2>&1
    echo "$? $SECONDS" >"$logs/types.end"
} &
types=$!
if [ $# -gt 0 ]; then
    python -m pytest "$@"
    record 'pytest' $? "$start"
else
    # Three runs side by side, of about the same length: one at a time leaves a third of two cores
    # idle, for much of it waits for processes. Whole jobs are apart from single servers.
    jobs=(tests/e2e/test_{bad_input,controller,kill,quickstart}.py)
    jobs+=(tests/dist_cpu/test_convert_kill.py)
    python -m pytest tests/dist_cpu "${jobs[@]/#/--ignore=}" >"$logs/ranks" 2>&1 &
    ranks_run=$!
    python -m pytest "${jobs[@]}" >"$logs/jobs" 2>&1 &
    jobs_run=$!
    python -m pytest --ignore=tests/dist_cpu --ignore=tests/e2e
    record 'pytest' $? "$start"
    python -m pytest tests/e2e "${jobs[@]/#/--ignore=}"
    record 'pytest servers' $? "$start"
    wait "$ranks_run"
    record 'pytest ranks' $? "$start"
    wait "$jobs_run"
    record 'pytest jobs' $? "$start"
    cat "$logs/ranks" "$logs/jobs"
fi
wait "$types"
read -r status ended <"$logs/types.end" || { status=1 ended=$SECONDS; }
[ "$status" -eq 0 ] || printf '== mypy\n%s\n\n' "$(<"$logs/types")"
record 'mypy' "$status" $((SECONDS - ended + start))

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
