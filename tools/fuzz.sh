#!/bin/bash
# Packs the fuzz targets for a machine that has many processors and no Rust: ARCHIVE holds the
# release-built, stripped libFuzzer programs, their inputs kept in fuzz/corpus/, and run.sh, which
# runs them there. They need an x86-64 Linux with glibc 2.35 or newer, and what comes with it.
#
#   tools/fuzz.sh [ARCHIVE]      default: .bundle/fuzz.tar.xz
#
# Needs cargo-fuzz, stable Rust and g++.
set -euo pipefail
cd "$(dirname "$0")/.."

archive_bytes_max=$((20 * 1024 * 1024))
targets=(pinned storage trace unit)
archive=$(realpath -m "${1:-.bundle/fuzz.tar.xz}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=$scratch/fuzz
mkdir -p "$out/bin" "$(dirname "$archive")"

# The C++ library is linked in, so that it need not be there. The C library is not: libFuzzer asks
# it for functions by their names, which a static one cannot answer.
cxx=$(dirname "$(g++ -print-file-name=libstdc++.a)")
CXXSTDLIB=static=stdc++ RUSTFLAGS="${RUSTFLAGS:-} -L native=$cxx" \
    cargo fuzz build -s none --target-dir target/fuzz-static
built=target/fuzz-static/x86_64-unknown-linux-gnu/release
for target in "${targets[@]}"; do
    needs=$(readelf -d "$built/$target" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
        grep -vxE 'lib(c|m|dl|pthread|rt|gcc_s)\.so\.[0-9]+|ld-linux-x86-64\.so\.2' || true)
    newest=$(readelf -V "$built/$target" | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -n 1)
    if [ -n "$needs" ] || [ "$(printf '%s\nGLIBC_2.35\n' "$newest" | sort -V | tail -n 1)" != \
        GLIBC_2.35 ]; then
        echo "$target needs $newest and these libraries: ${needs:-none}" >&2
        exit 1
    fi
    strip -o "$out/bin/$target" "$built/$target"
    mkdir -p "$out/corpus/$target"
    cp "fuzz/corpus/$target/"* "$out/corpus/$target/"
done
install -m 755 fuzz/run.sh "$out"
commit=$(git rev-parse HEAD)
# A campaign on anything but a commit cannot be made again.
[ -z "$(git status --porcelain)" ] || commit=$commit-changed
echo "$commit" > "$out/COMMIT"

XZ_OPT='-T0 -6' tar -C "$scratch" -cJf "$archive" fuzz
bytes=$(stat -c %s "$archive")
echo "built from $commit"
echo "$archive: $bytes bytes of at most $archive_bytes_max"
if [ "$bytes" -gt "$archive_bytes_max" ]; then
    echo "the archive is too large" >&2
    exit 1
fi
