#!/bin/bash
# Fuzzes with the programs of the archive it lies in; tools/fuzz.sh packs it.
#
#   run.sh FOLDER SECONDS PROCESSES [TARGET...]      every target without one, one after another
#
# Each target runs SECONDS long in PROCESSES processes at a time, and ends at its first crash,
# timeout or want of memory. FOLDER gets crashes/, the inputs that broke something, each under its
# target's name; corpus/TARGET/, the smallest set of inputs that reaches all that was reached; logs/;
# and summary.tsv, whose lines are printed, too: executions, core-seconds, crashes, coverage before
# and after. "Coverage" is what libFuzzer counts: edges of the program, and features.
#
# found.tar.gz holds crashes/, corpus/ and logs/, for the way home.
#
# LIGHTERING_FUZZ_MAX_LEN sets the longest input (400). Exits 0 when nothing broke.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 3 ]; then
    sed -n '2,/^set /{/^set /!p}' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
folder=$(cd "$1" && pwd)
seconds=$2
processes=$3
shift 3
targets=("$@")
[ $# -gt 0 ] || targets=(pinned storage trace unit)
for target in "${targets[@]}"; do
    [ -x "$here/bin/$target" ] || { echo "no such target: $target" >&2; exit 2; }
done
max_len=${LIGHTERING_FUZZ_MAX_LEN:-400}
mkdir -p "$folder/crashes" "$folder/corpus" "$folder/logs" "$folder/new" "$folder/tmp"
export TMPDIR=$folder/tmp

# Prints "EDGES FEATURES" that a target reaches with the inputs of some folders.
reached() {
    local target=$1
    shift
    "$here/bin/$target" -runs=0 -max_len="$max_len" "$@" 2>&1 |
        sed -n 's/.*INITED *cov: \([0-9]*\) ft: \([0-9]*\).*/\1 \2/p' | tail -n 1
}

commit=$(cat "$here/COMMIT" 2> /dev/null || echo unknown)
echo "commit $commit, $(nproc) processors, $(uname -sr), $(date -u +%Y-%m-%dT%H:%MZ)" |
    tee "$folder/machine.txt"
columns=(target executions core_seconds crashes edges_before edges_after features_before
    features_after inputs_kept exit)
(IFS=$'\t'; echo "${columns[*]}") | tee "$folder/summary.tsv"

worst=0
for target in "${targets[@]}"; do
    log=$folder/logs/$target.log
    seeds=$here/corpus/$target
    new=$folder/new/$target
    kept=$folder/corpus/$target
    # A campaign that goes on in the same folder begins with what it kept.
    mkdir -p "$new" "$kept"
    before=$(reached "$target" "$seeds" "$kept")
    TIMEFORMAT='%U %S'
    used=$( { time "$here/bin/$target" -fork="$processes" -max_total_time="$seconds" \
        -max_len="$max_len" -timeout=60 -ignore_crashes=0 -ignore_timeouts=0 -ignore_ooms=0 \
        -artifact_prefix="$folder/crashes/$target-" "$new" "$seeds" "$kept" \
        > "$log" 2>&1; } 2>&1; echo "$?")
    code=$(tail -n 1 <<< "$used")
    cores=$(awk '/^[0-9.]+ [0-9.]+$/ { printf "%.1f", $1 + $2 }' <<< "$used")
    runs=$(sed -n 's/^#\([0-9]*\): cov: .*/\1/p' "$log" | tail -n 1)
    rm -rf "$kept.merged"
    mkdir "$kept.merged"
    "$here/bin/$target" -merge=1 -max_len="$max_len" "$kept.merged" "$seeds" "$kept" "$new" \
        > "$folder/logs/$target.merge.log" 2>&1
    merged=$?
    if [ "$merged" -eq 0 ]; then
        rm -rf "$kept" "$new"
        mv "$kept.merged" "$kept"
    fi
    after=$(reached "$target" "$kept")
    crashes=$(find "$folder/crashes" -name "$target-*" | wc -l)
    inputs=$(find "$kept" -type f | wc -l)
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$target" "${runs:-0}" "$cores" "$crashes" \
        "${before% *}" "${after% *}" "${before#* }" "${after#* }" "$inputs" "$code" |
        tee -a "$folder/summary.tsv"
    if [ "$code" -ne 0 ] || [ "$merged" -ne 0 ] || [ "$crashes" -ne 0 ] || [ -z "$runs" ]; then
        echo "$target: exit $code, merge $merged; the end of $log:" >&2
        tail -n 20 "$log" >&2
        worst=1
    fi
done
rmdir "$folder/new" "$folder/tmp" 2> /dev/null
tar -C "$folder" -czf "$folder/found.tar.gz" crashes corpus logs || worst=1
exit "$worst"
