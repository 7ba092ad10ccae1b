#!/bin/bash
# Packs the release-built tests, benches and examples for a machine that has a GPU and no Rust:
# .bundle/lightering.tar.xz holds the stripped programs; run.sh, which runs them by name there; and
# measure.sh, which measures with them what benches/results/required.json asks for. python/ holds
# the wheel with its tests and benches, which python.sh runs with the Python and torch found there.
#
#   tools/bundle.sh [CARGO OPTION...]      such as --no-default-features; all features without one
set -euo pipefail
cd "$(dirname "$0")/.."

archive_bytes_max=$((40 * 1024 * 1024))
# These read the source tree, which is not there.
at_home=(figures layers reliability results fuzz_replay)

options=("$@")
[ $# -gt 0 ] || options=(--all-features)
out=.bundle/lightering
rm -rf .bundle
mkdir -p "$out/bin"

# Prints "KIND NAME PATH" of every program of this kind that cargo reports on its standard input.
programs() {
    python3 -c '
import json, sys
wanted = sys.argv[1]
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") != "compiler-artifact" or not message.get("executable"):
        continue
    target = message["target"]
    # The unit tests of the crate itself are a program too, of a kind such as lib.
    if wanted in target["kind"] or (wanted == "test" and "bench" not in target["kind"]):
        print(wanted, target["name"], message["executable"])
' "$1"
}

build=(--release --locked --message-format=json-render-diagnostics "${options[@]}")
bench=(--locked --message-format=json-render-diagnostics "${options[@]}")
{
    cargo test --no-run --lib --tests "${build[@]}" | programs test
    cargo build --examples "${build[@]}" | programs example
    cargo bench --no-run --benches "${bench[@]}" | programs bench
} > .bundle/programs

while read -r kind name path; do
    for left in "${at_home[@]}"; do
        [ "$kind:$name" != "test:$left" ] || continue 2
    done
    strip -o "$out/bin/$kind-$name" "$path"
    echo "packed $kind:$name ($(($(stat -c %s "$out/bin/$kind-$name") / 1024)) KiB)"
done < .bundle/programs
[ -n "$(ls "$out/bin")" ] || { echo "nothing was built" >&2; exit 1; }

if [ -d examples/data ]; then
    mkdir -p "$out/examples"
    cp -r examples/data "$out/examples/"
fi
tools/wheel.sh "$out/python"
(
    . /etc/os-release
    echo "wheel built with $(python3 --version) on $PRETTY_NAME"
) > "$out/python/BUILT"
cp -r python/tests "$out/python/"
[ ! -d python/benches ] || cp -r python/benches "$out/python/"
mkdir -p "$out/python/benches"
cp benches/*.py "$out/python/benches/"
# Pure Python, for machines without one.
python3 -m pip install --quiet --no-compile --target "$out/python/site" pytest pytest-xdist
find "$out/python" -name __pycache__ -prune -exec rm -rf {} +
install -m 755 tools/python.sh tools/run.sh tools/measure.sh tools/figures.py "$out"
cp benches/results/required.json "$out"
commit=$(git rev-parse HEAD)
# A figure measured on anything but a commit cannot be measured again.
[ -z "$(git status --porcelain)" ] || commit=$commit-changed
echo "$commit" > "$out/COMMIT"

# The programs share most of their code, which a window larger than any of them finds. Unpack with
# `tar -xJf`, or, where there is no xz, with `python3 -m tarfile -e`.
XZ_OPT='-T0 --lzma2=preset=6,dict=96MiB' tar -C .bundle -cJf .bundle/lightering.tar.xz lightering
bytes=$(stat -c %s .bundle/lightering.tar.xz)
echo "built from $commit"
echo ".bundle/lightering.tar.xz: $bytes bytes of at most $archive_bytes_max"
if [ "$bytes" -gt "$archive_bytes_max" ]; then
    echo "the archive is too large" >&2
    exit 1
fi
