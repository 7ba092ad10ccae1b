#!/bin/bash
# Fetches the peers that steps.py compares with, and what they import, into a folder for a machine
# that has torch and transformers and no network; there, PYTHONPATH=FOLDER lets steps.py find them.
#
#   python/benches/peers.sh FOLDER [PYTHON VERSION, such as 3.12]
#
# Needs pip and a python3 with torch, which DeepSpeed's source asks for. About 9 MiB packed.
set -euo pipefail

folder=${1:?a folder to fetch the peers into}
version=${2:-3.12}
trl=1.16.0
deepspeed=0.19.8
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
wheels=(--quiet --target "$folder" --python-version "$version" --only-binary=:all: --upgrade)
python3 -m pip install "${wheels[@]}" pydantic psutil msgpack hjson py-cpuinfo einops
python3 -m pip install "${wheels[@]}" --no-deps "trl==$trl" accelerate
# Of DeepSpeed there is a source only; what is used of it is Python.
python3 -m pip download --quiet --no-deps --no-binary deepspeed --dest "$scratch" \
    "deepspeed==$deepspeed"
tar xzf "$scratch/deepspeed-$deepspeed.tar.gz" -C "$scratch"
cp -r "$scratch/deepspeed-$deepspeed/deepspeed" "$folder/"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$folder"
