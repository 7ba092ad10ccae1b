#!/bin/bash
# Runs programs of the bundle it lies in and keeps what they print.
#
#   run.sh                                   lists the programs
#   run.sh [-o FOLDER] [-t SECONDS] ITEM...  runs each ITEM, at most SECONDS long (default: 540)
#
# An ITEM is one word of the list, with its arguments in the same quotes: 'example:train --json'.
# The word `tests` stands for every test. FOLDER gets machine.txt, summary.tsv and all.log, three
# files however many ITEMs; programs find it as LIGHTERING_RESULTS, and the commit they were built
# from as LIGHTERING_COMMIT.
# Exits 0 when every ITEM did.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=$PWD/results
seconds_max=540
while getopts o:t: option; do
    case $option in
        o) folder=$OPTARG ;;
        t) seconds_max=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))

names() {
    local path
    for path in "$here"/bin/*; do
        path=${path##*/}
        echo "${path/-/:}"
    done
}

if [ $# -eq 0 ]; then
    names
    exit 0
fi

items=()
for item in "$@"; do
    if [ "$item" = tests ]; then
        mapfile -t -O "${#items[@]}" items < <(names | grep '^test:')
    else
        items+=("$item")
    fi
done

mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
LIGHTERING_COMMIT=$(cat "$here/COMMIT")
export LIGHTERING_COMMIT LIGHTERING_RESULTS=$folder CRITERION_HOME=$folder/criterion
{
    echo "commit $LIGHTERING_COMMIT"
    date -u +'date %Y-%m-%dT%H:%M:%SZ'
    uname -srm
    nproc | sed 's/^/cores /'
    grep MemTotal /proc/meminfo
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null ||
        echo 'no nvidia-smi'
} > "$folder/machine.txt"
cat "$folder/machine.txt"
if ldd "$here"/bin/* 2>&1 | grep 'not found'; then
    echo "this machine's libraries are older than those of the machine that built the bundle" >&2
    exit 1
fi

passed=0
failed=0
: > "$folder/all.log"
printf 'item\texit\tseconds\n' > "$folder/summary.tsv"
for item in "${items[@]}"; do
    read -ra words <<< "$item"
    program=$here/bin/${words[0]/:/-}
    arguments=("${words[@]:1}")
    # Criterion measures only when it is told that cargo bench runs it.
    [ "${words[0]%%:*}" != bench ] || arguments=(--bench "${arguments[@]}")
    echo "== $item" | tee -a "$folder/all.log"
    started=$(date +%s.%N)
    if [ -x "$program" ]; then
        (cd "$here" && timeout -k 10 "$seconds_max" "$program" "${arguments[@]}") 2>&1 |
            tee -a "$folder/all.log"
        code=${PIPESTATUS[0]}
    else
        echo "no such program in this bundle" | tee -a "$folder/all.log"
        code=127
    fi
    seconds=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    printf '%s\t%s\t%s\n' "$item" "$code" "$seconds" >> "$folder/summary.tsv"
    if [ "$code" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
column -t -s $'\t' "$folder/summary.tsv" 2> /dev/null || cat "$folder/summary.tsv"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
