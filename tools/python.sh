#!/bin/bash
# Runs the Python tests of the bundle it lies in, with the wheel of the bundle and the machine's own
# Python and torch; installs nothing and uses no network. Ends with a table, one line a file.
#
#   python.sh [-o FOLDER] [-p PYTHON] [-n COUNT] [PYTEST ARGUMENT...]   such as tests -k order
#   python.sh [-o FOLDER] [-p PYTHON] run FILE [ARGUMENT...]            such as benches/steps.py
#
# -n shares the tests among so many processes, each with its part of the pinned memory: of 16 cores
# and one GPU, `python.sh -n 8 tests -k "not sim"`. Each test is run by whoever is free.
# FOLDER gets machine.txt, pytest.log, pytest.xml and summary.tsv. Exits 0 when every test that ran
# passed; tests that did not run are listed with the reason.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=$PWD/results
python=python3
share=()
while getopts o:p:n: option; do
    case $option in
        o) folder=$OPTARG ;;
        p) python=$OPTARG ;;
        n) share=(-n "$OPTARG" --dist worksteal) ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m zipfile -e "$here"/python/*.whl "$site" || exit 2
LIGHTERING_COMMIT=$(cat "$here/COMMIT")
export LIGHTERING_COMMIT LIGHTERING_RESULTS=$folder
# The machine's own pytest goes first; the bundle's is there where it has none.
# What was there before stays behind it: peers.sh fetches peers into such a folder.
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
"$python" -c 'import pytest, xdist' 2> /dev/null || export PYTHONPATH=$PYTHONPATH:$here/python/site
cd "$here/python" || exit 2
{
    echo "commit $LIGHTERING_COMMIT"
    cat "$here/python/BUILT"
    date -u +'date %Y-%m-%dT%H:%M:%SZ'
    uname -srm
    "$python" - << 'END'
import platform
import lightering, torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
try:
    import transformers
    print("transformers", transformers.__version__)
except ImportError:
    print("no transformers")
for index in range(torch.cuda.device_count()):
    print(f"cuda:{index}", torch.cuda.get_device_name(index))
print(lightering.Engine("auto"))
END
} > "$folder/machine.txt" 2>&1 || { cat "$folder/machine.txt"; exit 1; }
cat "$folder/machine.txt"

if [ "${1:-}" = run ]; then
    shift
    "$python" "$@" 2>&1 | tee "$folder/run.log"
    exit "${PIPESTATUS[0]}"
fi
[ $# -gt 0 ] || set -- tests
# The log names each test as it ends, so that a run cut short tells which ones failed.
"$python" -m pytest -v -rs -p no:cacheprovider "${share[@]}" \
    --junitxml="$folder/pytest.xml" "$@" 2>&1 |
    tee "$folder/pytest.log" |
    grep -vE '^(\[gw|tests/).* (PASSED|SKIPPED)( |$)|^tests/[^ ]*::[^ ]* *$'
code=${PIPESTATUS[0]}
"$python" - "$folder" << 'END'
import collections, sys
import xml.etree.ElementTree as xml
folder = sys.argv[1]
rows = collections.defaultdict(lambda: [0, 0, 0, 0.0])
for case in xml.parse(f"{folder}/pytest.xml").iter("testcase"):
    row = rows[case.get("classname", "").split(".")[-1]]
    failed = case.find("failure") is not None or case.find("error") is not None
    row[1 if failed else 2 if case.find("skipped") is not None else 0] += 1
    row[3] += float(case.get("time", 0))
with open(f"{folder}/summary.tsv", "w") as table:
    table.write("file\tpassed\tfailed\tnot run\tseconds\n")
    for name, row in sorted(rows.items()):
        table.write("\t".join([name, *map(str, row[:3]), f"{row[3]:.1f}"]) + "\n")
END
column -t -s $'\t' "$folder/summary.tsv" 2> /dev/null || cat "$folder/summary.tsv"
exit "$code"
