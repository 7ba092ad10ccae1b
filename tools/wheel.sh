#!/bin/bash
# Builds the wheel of python/ into a folder: abi3 for Python 3.10 and later, stripped.
#
#   tools/wheel.sh FOLDER
#
# Uses the maturin of python3 where it has one, else one in target/maturin.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath "$1")
python=python3
if ! "$python" -c 'import maturin' 2> /dev/null; then
    python=target/maturin/bin/python3
    [ -x "$python" ] || python3 -m venv target/maturin
    "$python" -c 'import maturin' 2> /dev/null || "$python" -m pip install --quiet 'maturin>=1.9,<2'
fi
"$python" -m maturin build --quiet --profile wheel --locked --strip --interpreter python3 \
    --manifest-path python/Cargo.toml --out "$folder"
ls -l "$folder"/*.whl
