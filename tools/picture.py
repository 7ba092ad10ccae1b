#!/usr/bin/env python3
"""Draws bandwidth against the size of pieces from the figures in benches/results.

    tools/picture.py            writes docs/bandwidth.svg
    tools/picture.py --check    compares, writes nothing, exits 1 where the picture is another one

Each line is a way, out or in, through the engine (whole) and by raw copies (dashed), of the latest
day on which it was measured. Where nothing was measured there is nothing to draw, and it says so.
Only Python's own library is used. --results FOLDER and --into FILE are for tests.
"""

import argparse
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 20, 40, 50
WAYS = (("out", "#1f5fa8"), ("in", "#b04a1e"))
UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30}


def latest(folder):
    """The latest figure of each name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == "required.json":
            continue
        for figure in json.loads(path.read_text()):
            old = found.get(figure["name"])
            if old is None or old["date"] < figure["date"]:
                found[figure["name"]] = figure
    return found


def points(figures, way):
    """(bytes, ours, raw, label) by size."""
    of = []
    for name, figure in figures.items():
        parts = re.fullmatch(rf"link\.{way}-(\d+)(kib|mib|gib)", name)
        if parts:
            label = f"{parts[1]} {parts[2][0].upper()}iB"
            size = int(parts[1]) * UNITS[parts[2]]
            of.append((size, figure["value"], figure["reference"], label))
    return sorted(of)


def draw(lines, figure):
    """The picture as text."""
    every = [point for _, _, line in lines for point in line]
    sizes = sorted({(size, label) for size, _, _, label in every})
    low, high = math.log2(sizes[0][0]), math.log2(sizes[-1][0])
    top = 10 * math.ceil(max(max(ours, raw) for _, ours, raw, _ in every) / 10)

    def x(size):
        share = (math.log2(size) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(rate):
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20">GB/s by size of pieces, 2 GiB queued; {figure["hardware"]}, '
        f'driver {figure["driver"]}, {figure["date"]}</text>',
    ]
    for rate in range(0, top + 1, 10):
        out.append(f'<path d="M{LEFT} {y(rate):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate}</text>')
    for size, label in sizes:
        out.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 20}" '
                   f'text-anchor="middle">{label}</text>')
    for nth, (way, colour, line) in enumerate(lines):
        for which, dash, word in ((1, "", "lightering"), (2, ' stroke-dasharray="4 3"', "raw")):
            path = " ".join(f"{x(point[0]):.1f},{y(point[which]):.1f}" for point in line)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
            at = LEFT + 20 + 130 * (2 * nth + which - 1)
            out.append(f'<path d="M{at} {HEIGHT - 12}h24" stroke="{colour}"{dash}/>')
            out.append(f'<text x="{at + 30}" y="{HEIGHT - 8}">{way}, {word}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--check", action="store_true")
    words.add_argument("--results", type=pathlib.Path, default=ROOT / "benches" / "results")
    words.add_argument("--into", type=pathlib.Path, default=ROOT / "docs" / "bandwidth.svg")
    options = words.parse_args()
    figures = latest(options.results)
    lines = [(way, colour, points(figures, way)) for way, colour in WAYS]
    lines = [line for line in lines if line[2]]
    if not lines:
        if options.into.exists():
            sys.exit(f"{options.into}: of figures that are not there")
        print("no bandwidth was measured yet: nothing to draw")
        return
    newest = max((figure for name, figure in figures.items() if name.startswith("link.")),
                 key=lambda figure: figure["date"])
    text = draw(lines, newest)
    if not options.check:
        options.into.write_text(text)
        print(f"{options.into}: {len(lines)} ways")
    elif not options.into.exists() or options.into.read_text() != text:
        sys.exit(f"{options.into}: not what the figures say; run tools/picture.py")


if __name__ == "__main__":
    main()
