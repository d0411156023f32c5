#!/usr/bin/env bash
# Set-up, every static gate, then the tests of a lane. Arguments go to pytest; the gates always run.
#
#   bash tests/run.sh                # the short lane: unit tests, a job of each trainer, a server
#   bash tests/run.sh --all          # what CI runs: the short lane, then all others but `nightly`
#   bash tests/run.sh --nightly      # every test there is
#   bash tests/run.sh -m server -k seed -x
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
lanes='not nightly and (smoke or not (ranks or server or job))' # as in tests/conftest.py
workers=2
case "${1-}" in
--all)
    lanes='not nightly' workers=3
    shift
    ;;
--nightly)
    lanes='' workers=3
    shift
    ;;
esac
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
# Names and docstrings in the words of the field.
gate 'words' python tests/check_words.py benchmarks examples models mcore_rl tests
# shellcheck disable=SC2317  # `gate` calls it
build_site() { bash launch/setup_env.sh docs && NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict; }
gate 'docs site' build_site
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
# With whole lanes three workers: on two cores, one lane's waits for processes are another's time.
python -m pytest -n "$workers" -m "$lanes" "$@"
record 'pytest' $? "$start"
wait "$types"
read -r status ended <"$logs/types.end" || { status=1 ended=$SECONDS; }
[ "$status" -eq 0 ] || printf '== mypy\n%s\n\n' "$(<"$logs/types")"
record 'mypy' "$status" $((SECONDS - ended + start))

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
