#!/bin/bash
# Measures on a machine with a GPU what benches/results/required.json asks for, from the unpacked
# bundle that it lies in (tools/bundle.sh). Needs bash and the bundle; the last part needs Python 3.
#
#   measure.sh [-o FOLDER] [-t SECONDS] [-r] [PART...]
#
#   conformance  promises of the driver seam that CUDA keeps             at most  30 s
#   seam         the host's time for the seam's verbs beside the driver's own calls   30 s
#   calibrate    the device's figures, for the simulated device                  45 s
#   train        what is compared in turn, there and back, in one process       200 s
#   first        first steps: with pinned memory reserved, and with none          70 s
#   overlap      matrix products and memory-bound kernels in turn               140 s
#   link         copies at the limit of the link, and the host's time for verbs          330 s
#   link:A,B     only those of its measures: bandwidth-small, bandwidth-large, both, cold, latency,
#                address, urgent, prefetch-0, -1, -2, -4, rows, gemm, batch, scale, and, with two
#                GPUs, two and apart; each is a program of its own with a limit of its own
#   pinned       page-locking beside the driver's own                           90 s
#   lend         the pool's books, block by block                                45 s
#   allocator    PyTorch's own pool of pinned memory, where torch is             90 s
#   predict      the same programs on the simulated device, with those figures   45 s
#   sanitizer    small runs under NVIDIA's compute-sanitizer                     90 s
#   figures      a table of all that, and FOLDER/figures.json
#
# PYTHON names the Python whose torch is measured; python3 otherwise.
# Without a PART all run, in this order. FOLDER is $OUT, or ./results. A part replaces what it left
# there before; what other parts left stays, so parts can be run one by one. FOLDER holds
# machine.txt, model.txt, runs.jsonl, figures.json and all.log.
#   -t  what a part may take, instead of the times above
#   -r  a rehearsal without a GPU: the simulated device, small sizes, no sanitizer
# Exits 0 when every program of every part did.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=${OUT:-$PWD/results}
device=cuda:0
sizes=(--layers 24 --hidden 4096 --tokens 32768)
steps=8
layer=(--hidden 4096 --tokens 32768)
copies=(--bytes 256MiB --count 16)
queued=()
pinned=(--cold 8GiB --bytes 8GiB,32GiB)
rounds=()
promises=cuda::
rehearsal=()
seconds_max=''
all=(conformance seam calibrate train first overlap link pinned lend allocator predict sanitizer
    figures)
parts_all=("${all[@]}")
while getopts o:t:r option; do
    case $option in
        o) folder=$OPTARG ;;
        t) seconds_max=$OPTARG ;;
        r)
            device=sim
            sizes=(--layers 3 --hidden 64 --tokens 256)
            steps=4
            layer=(--hidden 1024 --tokens 4096)
            copies=(--bytes 1MiB --count 4)
            promises=timed::
            rehearsal=(--rehearsal)
            all=(conformance calibrate train first overlap link pinned lend predict figures)
            queued=(--total 256MiB --pairs 1)
            pinned=(--cold 1MiB --bytes 2MiB,4MiB)
            rounds=(--quick)
            ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
parts=("$@")
[ $# -gt 0 ] || parts=("${all[@]}")
links=(bandwidth-small bandwidth-large both cold latency address urgent
    prefetch-0 prefetch-1 prefetch-2 prefetch-4 rows gemm batch scale two apart)
for part in "${parts[@]}"; do
    words=" ${links[*]} "
    case " ${parts_all[*]} " in
        *" ${part%%:*} "*) ;;
        *) echo "measure.sh: $part is no part: ${all[*]}" >&2 && exit 2 ;;
    esac
    [ "${part#*:}" != "$part" ] || continue
    [ "${part%%:*}" = link ] || { echo "measure.sh: only link has measures" >&2 && exit 2; }
    for word in $(tr , ' ' <<< "${part#*:}"); do
        case $words in
            *" $word "*) ;;
            *) echo "measure.sh: $word is no measure of link:$words" >&2 && exit 2 ;;
        esac
    done
done

mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
log=$folder/all.log
runs=$folder/runs.jsonl
model=$folder/model.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
touch "$runs" "$log"
LIGHTERING_COMMIT=$(cat "$here/COMMIT")
export LIGHTERING_COMMIT LIGHTERING_REQUIRE_CUDA=1
[ "$device" != sim ] || unset LIGHTERING_REQUIRE_CUDA
{
    echo "commit $LIGHTERING_COMMIT"
    date -u +'date %Y-%m-%dT%H:%M:%SZ'
    echo "device $device"
    uname -srm
    nproc | sed 's/^/cores /'
    grep MemTotal /proc/meminfo
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null |
        head -n 1
} > "$folder/machine.txt"
if [ -s "$runs" ] && ! grep -qF "\"commit\": \"$LIGHTERING_COMMIT\"" "$runs"; then
    echo "measure.sh: $runs is of another commit: take another folder" >&2
    exit 2
fi

run=$(grep -o '"run": [0-9]*' "$runs" | sed 's/.* //' | sort -n | tail -n 1)
run=${run:-0}
failed=0
part=''
measures=''
deadline=0
# What one program may take, where that is less than what is left of its part's time.
program_seconds_max=''

say() { echo "$*" | tee -a "$log"; }
left() {
    local left=$((deadline - SECONDS))
    if [ -n "$program_seconds_max" ] && [ "$program_seconds_max" -lt "$left" ]; then
        left=$program_seconds_max
    fi
    echo "$left"
}

# Adds what a program said, a JSON object, to the runs.
record() { # KIND COMMAND SAID
    local form='{"part": "%s", "kind": "%s", "run": %d, "command": "%s", '
    form+='"commit": "%s", "said": %s}'
    printf "$form\n" \
        "$part" "$1" "$run" "${2//$folder\//}" "$LIGHTERING_COMMIT" "$3" >> "$runs"
}

# Runs a program of the bundle within what is left of the part's time; leaves all it printed in
# $scratch/out. On the screen comes what people read.
program() { # WRAPPER... -- PROGRAM ARGUMENT...
    local wrapper=()
    while [ "$1" != -- ]; do wrapper+=("$1") && shift; done
    shift
    local path=$here/bin/$1 code
    shift
    say "== ${path##*/} $*"
    (cd "$here" && timeout -k 5 "$(left)" "${wrapper[@]}" "$path" "$@") 2>&1 |
        tee "$scratch/out" | tee -a "$log" | grep -Ev '^\{.*\}$|^test .* ok$|^$'
    code=${PIPESTATUS[0]}
    [ "$code" -ne 124 ] || say "-- out of time"
    return "$code"
}

# A program whose lines of JSON are kept.
figures_of() { # KIND PROGRAM ARGUMENT...
    local kind=$1 name=$2 code=0 line
    shift 2
    run=$((run + 1))
    program -- "$name" "$@" --json || code=$?
    while read -r line; do
        record "$kind" "${name#*-} $* --json" "$line"
    done < <(grep '^{.*}$' "$scratch/out")
    [ "$code" -eq 0 ] || failed=$((failed + 1))
    return "$code"
}

example() { # KIND NAME ARGUMENT...
    local kind=$1 name=$2
    shift 2
    figures_of "$kind" "example-$name" "$@"
}

measure_conformance() {
    local code=0 counts passed wrong
    run=$((run + 1))
    program -- test-conformance "$promises" || code=$?
    [ "$code" -eq 0 ] || failed=$((failed + 1))
    counts=$(grep '^test result: ' "$scratch/out") || return
    passed=$(sed 's/.* \([0-9]*\) passed.*/\1/' <<< "$counts")
    wrong=$(sed 's/.* \([0-9]*\) failed.*/\1/' <<< "$counts")
    record '' "test:conformance $promises" "{\"passed\": $passed, \"failed\": $wrong}"
}

measure_seam() {
    local line code=0
    run=$((run + 1))
    program -- test-cuda_device --ignored --nocapture the_checks_of_a_verb || code=$?
    [ "$code" -eq 0 ] || failed=$((failed + 1))
    while read -r line; do
        record '' 'test:cuda_device --ignored --nocapture the_checks_of_a_verb' "$line"
    done < <(grep -o '{"figure".*}$' "$scratch/out")
}

measure_calibrate() {
    run=$((run + 1))
    if program -- example-calibrate --device "$device" "${layer[@]}"; then
        grep -E '^(#.*|[a-z_.]+ = .*)$' "$scratch/out" > "$model"
    else
        failed=$((failed + 1))
    fi
}

measure_train() {
    local modes=checkpoint,checkpoint+raw,checkpoint+offload
    local back=checkpoint+offload,checkpoint+raw,checkpoint
    local began=$SECONDS took=0
    # Three rounds, or as many as there is time for.
    for _ in 1 2 3; do
        [ "$took" -lt "$(left)" ] || break
        began=$SECONDS
        example '' train --device "$device" "${sizes[@]}" --steps "$steps" --modes "$modes,$back" ||
            return
        took=$((SECONDS - began + 1))
    done
    if [ "$((took / 4))" -lt "$(left)" ]; then
        example '' train --device "$device" "${sizes[@]}" --steps "$steps" --modes none
    fi
}

measure_first() {
    local modes=checkpoint,checkpoint+grow,checkpoint+offload
    local back=checkpoint+offload,checkpoint+grow,checkpoint
    example '' train --device "$device" "${sizes[@]}" --steps 3 --modes "$modes,$back"
}

measure_overlap() {
    local kind memory began=$SECONDS took=0
    # Of each kind of compute beside copies of the same bytes, and of bytes of the engine's own.
    for kind in gemm hbm hbm-owned gemm-owned hbm gemm hbm-owned gemm-owned; do
        [ "$took" -lt "$(left)" ] || break
        began=$SECONDS
        case $kind in
            *-owned) memory=owned ;;
            *) memory=adopted ;;
        esac
        example "$kind" overlap --device "$device" --compute "${kind%-owned}" --memory "$memory" \
            "${copies[@]}" --runs 15
        took=$((SECONDS - began + 1))
    done
}

# A measure that is cut short keeps the figures that it printed, and the next one has its turn.
measure_link() {
    local measure gpus many=()
    gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l)
    for measure in "${links[@]}"; do
        case ",${measures:-$measure}," in
            *",$measure,"*) ;;
            *) continue ;;
        esac
        case $measure in
            scale)
                program_seconds_max=60
                figures_of scale bench-scale
                ;;
            two | apart)
                if [ "$device" != sim ] && [ "$gpus" -lt 2 ]; then
                    say "$measure: NOT measured, this machine has $gpus GPUs"
                    continue
                fi
                program_seconds_max=40
                figures_of "$measure" bench-link --device "$device" "${queued[@]}" --only "$measure"
                ;;
            address)
                # The driver's mapping calls vary by half: the middle of fifteen pairs is not firm.
                [ ${#queued[@]} -gt 0 ] || many=(--pairs 101)
                program_seconds_max=40
                figures_of address bench-link --device "$device" "${queued[@]}" "${many[@]}" \
                    --only address
                ;;
            *)
                # Meant to take at most 20; the first one page-locks memory nobody used before.
                program_seconds_max=40
                figures_of "$measure" bench-link --device "$device" "${queued[@]}" --only "$measure"
                ;;
        esac
    done
    program_seconds_max=''
}

# What criterion says of a bench, beside the most that it may take, in nanoseconds.
criterion() { # FIGURE BENCH MOST
    local found=$scratch/criterion/$2/new/estimates.json time
    time=$(sed -n 's/.*"median":{[^}]*},"point_estimate":\([0-9.]*\).*/\1/p' "$found") || return
    record '' "bench:pinned $2" "$(printf '{"figure": "%s", "simulated": %s, "pairs": [[%s, %s]]}' \
        "$1" "$([ "$device" = sim ] && echo true || echo false)" "$time" "$3")"
}

measure_pinned() {
    figures_of '' example-pin --device "$device" "${pinned[@]}"
}

measure_lend() {
    run=$((run + 1))
    export CRITERION_HOME=$scratch/criterion
    if ! program -- bench-pinned --bench --noplot "${rounds[@]}" 'pinned/lend/(repeat|churn)'; then
        failed=$((failed + 1))
        return
    fi
    criterion pinned.lend-repeat pinned_lend_repeat 100 &&
        criterion pinned.lend-churn pinned_lend_churn_65k 600 || failed=$((failed + 1))
}

# Its figures are those of the parts `pinned` and `lend` beside what this says.
measure_allocator() {
    local python=${PYTHON:-python3} code=0 line
    if ! "$python" -c 'import torch' 2> /dev/null; then
        say "allocator: NOT measured: $python has no torch here"
        return
    fi
    run=$((run + 1))
    program "$python" -- ../python/benches/pytorch_pinned.py --bytes 8GiB,32GiB --json || code=$?
    while read -r line; do
        record '' "pytorch_pinned.py --bytes 8GiB,32GiB --json" "$line"
    done < <(grep '^{.*}$' "$scratch/out")
    [ "$code" -eq 0 ] || failed=$((failed + 1))
}

measure_predict() {
    local kind simulated=(--device sim --times-only --model "$model")
    if [ ! -s "$model" ]; then
        say "predict: no $model: calibrate comes first"
        failed=$((failed + 1))
        return
    fi
    example train train "${simulated[@]}" "${sizes[@]}" --steps 3 \
        --modes checkpoint,checkpoint+raw,checkpoint+offload
    for kind in gemm hbm; do
        example "$kind" overlap "${simulated[@]}" --compute "$kind" "${copies[@]}" --runs 1
    done
}

sanitized() { # TOOL PROGRAM ARGUMENT...
    local tool=$1 code=0 clean=false options=()
    shift
    # The conformance suite provokes refusals on purpose: those are no findings.
    [ "$tool" != memcheck ] || options=(--track-stream-ordered-races all --report-api-errors no)
    run=$((run + 1))
    program "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 -- "$@" || code=$?
    if [ "$code" -eq 124 ] || ! grep -q ' SUMMARY: ' "$scratch/out"; then
        failed=$((failed + 1))
        return
    fi
    if [ "$code" -eq 0 ] && ! grep -q ' SUMMARY: [^0]' "$scratch/out"; then
        clean=true
    else
        failed=$((failed + 1))
    fi
    record "$tool" "compute-sanitizer --tool $tool ${options[*]} $*" "{\"clean\": $clean}"
}

measure_sanitizer() {
    local tool small=(--device "$device" --layers 3 --hidden 64 --tokens 256 --steps 2)
    small+=(--modes 'checkpoint,checkpoint+offload')
    sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
    if [ -z "$sanitizer" ]; then
        say "sanitizer: no compute-sanitizer on this machine"
        failed=$((failed + 1))
        return
    fi
    # initcheck does not see what cuBLAS writes with bulk stores, so it is not run on the products.
    for tool in memcheck initcheck; do
        sanitized "$tool" test-conformance "$promises" --test-threads=1
    done
    for tool in memcheck racecheck synccheck; do
        sanitized "$tool" example-train "${small[@]}"
    done
}

measure_figures() {
    python3 "$here/figures.py" "$folder" "${rehearsal[@]}" || failed=$((failed + 1))
}

cat "$folder/machine.txt"
for part in "${parts[@]}"; do
    measures=''
    [ "${part#*:}" = "$part" ] || measures=${part#*:}
    part=${part%%:*}
    case $part in
        conformance | seam) seconds=30 ;;
        calibrate | predict) seconds=45 ;;
        train) seconds=200 ;;
        overlap) seconds=140 ;;
        first) seconds=70 ;;
        link) seconds=330 ;;
        lend) seconds=45 ;;
        *) seconds=90 ;;
    esac
    seconds=${seconds_max:-$seconds}
    started=$SECONDS
    deadline=$((SECONDS + seconds))
    for kind in $(tr , ' ' <<< "$measures"); do
        sed -i "/^{\"part\": \"$part\", \"kind\": \"$kind\",/d" "$runs"
    done
    [ "$part" = figures ] || [ -n "$measures" ] || sed -i "/^{\"part\": \"$part\",/d" "$runs"
    "measure_$part"
    say "-- $part: $((SECONDS - started)) s of at most $seconds"
done
[ "$failed" -eq 0 ] || echo "measure.sh: $failed programs failed"
[ "$failed" -eq 0 ]
