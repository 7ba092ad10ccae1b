#!/usr/bin/env python3
"""Makes figures of what tools/measure.sh left in a folder, as benches/results/README.md says.

    tools/figures.py FOLDER                  writes FOLDER/figures.json and prints a table
    tools/figures.py FOLDER --into RESULTS   besides adds them to RESULTS/DAY-HARDWARE.json, where
                                             they replace figures of the same name, and adds the log
    tools/figures.py FOLDER --rehearsal      takes simulated runs too; such figures go nowhere else

FOLDER holds machine.txt (commit, day, device), runs.jsonl (a line for each line that a program
printed) and all.log. A ratio is that of the middle pair: what is compared ran in turn in one
process, first with first, second with second; of two middle pairs the worse one counts. So value,
reference and ratio are of one pair that was measured, and not of three medians. Of a longest time
the longest of all counts. Each figure carries how many pairs it was taken from.

What is asked of each figure is in required.json alone: beside this file, or in benches/results.
overlap itself tells the middle ratio of its runs; the value is that part of its raw runs' median,
and the pairs are its runs, as it says itself: where it does not, the figure carries none.
Only Python's own library is used.
"""

import argparse
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("gemm", "hbm")
OWNED = tuple(f"{kind}-owned" for kind in KINDS)
TOLD = ("seam", "link", "latency", "address", "prefetch", "rows", "two", "scale", "pinned", "torch")
OFFLOAD, RAW, CHECKPOINT = "checkpoint+offload", "checkpoint+raw", "checkpoint"
GROW = "checkpoint+grow"


class Wrong(Exception):
    """What is wrong with the input, in one line."""


def read(path):
    try:
        return path.read_text()
    except OSError as error:
        raise Wrong(f"{path}: {error.strerror}") from error


# ---- what was measured ----


class Machine:
    """What the runs ran on."""

    def __init__(self, folder, rehearsal):
        path = folder / "machine.txt"
        text = read(path)

        def find(what, pattern):
            found = re.search(pattern, text, re.MULTILINE)
            if not found:
                raise Wrong(f"{path}: no {what}")
            return found.groups()

        (self.date,) = find("date", r"^date (\d{4}-\d\d-\d\d)")
        (device,) = find("device", r"^device (\S+)$")
        if not rehearsal and not device.startswith("cuda:"):
            raise Wrong(f"{path}: times of {device} are simulated, and no figures")
        if rehearsal:
            self.commit, self.hardware, self.driver = "0" * 40, "simulated", "none"
            return
        (self.commit,) = find("commit", r"^commit (\S+)$")
        if not re.fullmatch(r"[0-9a-f]{40}", self.commit):
            raise Wrong(f"{path}: {self.commit} is no commit: figures are measured on one")
        # As nvidia-smi says it: name, driver, memory.
        self.hardware, self.driver = find(
            "line of nvidia-smi's", r"^(\S[^,\n]*), ([0-9.]+), [0-9]+ MiB$")

    def file(self):
        """The name of the file that such figures go to."""
        words = re.findall("[a-z0-9]+", self.hardware.lower().replace("nvidia", ""))
        return f"{self.date}-{'-'.join(words)}"


class Runs:
    """The lines of all programs, by what was measured."""

    def __init__(self, folder, rehearsal):
        path = folder / "runs.jsonl"
        self.lines = []
        for number, text in enumerate(read(path).splitlines(), 1):
            try:
                line = json.loads(text)
                line["part"], line["kind"], line["run"], line["command"], line["said"].keys()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Wrong(f"{path}, line {number}: not what a run leaves: {error!r}") from error
            simulated = line["said"].get("simulated", False) and line["part"] != "predict"
            if simulated and not rehearsal:
                raise Wrong(f"{path}, line {number}: simulated times are no figures")
            self.lines.append(line)

    def of(self, part, kind="", **said):
        """The lines of a part and its kind whose program said this."""
        return [line for line in self.lines if (line["part"], line["kind"]) == (part, kind)
                and all(line["said"].get(name) == value for name, value in said.items())]

    def pairs(self, ours, theirs, value):
        """Values of ours beside theirs, first with first and second with second of each run."""
        pairs = []
        for run in sorted({line["run"] for line in ours}):
            both = [[line for line in lines if line["run"] == run] for lines in (ours, theirs)]
            pairs += [(value(mine, other), mine["command"]) for mine, other in zip(*both)]
        return [((mine, other), command) for (mine, other), command in pairs if mine and other]


def seconds(name):
    """This field of both lines of a pair."""
    return lambda mine, other: (mine["said"].get(name), other["said"].get(name))


def counted(lines, good, of=lambda said: 1):
    """How many of how many, as the one pair there is."""
    all_of_them = sum(of(line["said"]) for line in lines)
    if not all_of_them:
        return []
    return [((sum(good(line["said"]) for line in lines), all_of_them), lines[0]["command"])]


# ---- figures: name -> pairs of (value, reference), each with its command ----


def train(runs):
    ran = {mode: [line for line in runs.of("train", mode=mode) if line["said"].get("step_seconds")]
           for mode in (OFFLOAD, RAW, CHECKPOINT)}
    step = seconds("step_seconds")

    def freed(ours, theirs):
        """Bytes really given back beside those of all inputs that should leave, in GB."""
        held = [line["said"]["after_flush_device_bytes"] for line in (theirs, ours)]
        layers = ours["said"]["layers"]
        leave = max(layers - ours["said"]["keep_last"], 0)
        return (held[0] - held[1]) / 1e9, ours["said"]["boundary_bytes"] / layers * leave / 1e9

    hashed = [line for line in runs.of("train") if line["said"].get("grad_checksum")]
    wanted = hashed[0]["said"]["grad_checksum"] if hashed else None
    return {
        "train.step_over_raw": runs.pairs(ran[OFFLOAD], ran[RAW], step),
        "train.step_over_checkpoint": runs.pairs(ran[OFFLOAD], ran[CHECKPOINT], step),
        "train.freed_share": runs.pairs(ran[OFFLOAD], ran[CHECKPOINT], freed),
        "train.bit_equal": counted(hashed, lambda said: said["grad_checksum"] == wanted),
    }


def first(runs):
    """First steps: of a job that reserved nothing, beside checkpointing's and the time in which the
    pool pins so many bytes, as the same session measured it; and of one that reserved."""
    grown, reserved, plain = (runs.of("first", mode=mode) for mode in (GROW, OFFLOAD, CHECKPOINT))
    rates = sorted(ours for line in runs.of("pinned") for ours, _ in line["said"]["pairs"]
                   if line["said"]["figure"].startswith("pinned.rate"))
    step = seconds("first_step_seconds")

    def moved(mine, _):
        return mine["said"]["first_moved_bytes"] / 1e9, mine["said"]["moved_bytes"] / 1e9

    def pinned(mine, other):
        took, beside = step(mine, other)
        return took, beside + mine["said"]["moved_bytes"] / (rates[len(rates) // 2] * 1e9)

    return {
        "first.moved_share": runs.pairs(grown, grown, moved),
        "first.grown_step": runs.pairs(grown, plain, pinned) if rates else [],
        "first.reserved_step": runs.pairs(reserved, plain, step),
    }


def overlap(runs):
    def both(mine, _):
        raw = mine["said"]["both_raw_seconds"]
        return mine["said"]["ratio"] * raw, raw

    kinds = {kind: runs.of("overlap", kind) for kind in KINDS + OWNED}
    return {f"overlap.{kind}_over_raw": runs.pairs(lines, lines, both)
            for kind, lines in kinds.items()}


def overlap_runs(runs):
    """How many runs are behind each ratio that overlap told, at least; None where one says not."""
    found = {}
    for kind in KINDS + OWNED:
        counts = [line["said"].get("runs") for line in runs.of("overlap", kind)]
        found[f"overlap.{kind}_over_raw"] = min(counts, default=None) if all(counts) else None
    return found


def told(runs, asked, parts=("seam", "link", "pinned", "lend", "torch"), tables=TOLD):
    """Figures that a program names itself, with all their pairs; variants that nothing is asked of
    are left out."""
    figures = {name: [] for name in asked if name.split(".")[0] in tables}
    for line in (line for line in runs.lines if line["part"] in parts):
        said = line["said"]
        if said.get("figure") in figures:
            figures[said["figure"]] += [(tuple(pair), line["command"]) for pair in said["pairs"]]
    return figures


def allocator(runs):
    """The pool beside PyTorch's caching host allocator, as one session measured both: how fast new
    memory is page-locked, and what a block costs that is at hand."""

    def beside(name, theirs, value):
        ours = sorted(ours for part in ("pinned", "lend") for line in runs.of(part, figure=name)
                      for ours, _ in line["said"]["pairs"])
        return [((ours[len(ours) // 2], line["said"][value]), line["command"])
                for line in theirs if ours]

    figures = {"torch.pinned.block": beside("pinned.lend-repeat",
                                            runs.of("allocator", what="torch-block"),
                                            "nanoseconds")}
    for gib in (8, 32):
        theirs = runs.of("allocator", what="torch", bytes=gib << 30)
        figures[f"torch.pinned.rate-{gib}gib"] = beside(f"pinned.rate-{gib}gib", theirs,
                                                        "gb_per_second")
    return figures


def predict(runs):
    """Predicted beside the median measured; of several kinds the one predicted worst."""

    def beside(predicted, measured, name):
        values = sorted(line["said"][name] for line in measured if line["said"].get(name))
        if not predicted or not values:
            return []
        return [((predicted[0]["said"][name], values[len(values) // 2]), predicted[0]["command"])]

    step = beside(runs.of("predict", "train", mode=OFFLOAD), runs.of("train", mode=OFFLOAD),
                  "step_seconds")
    both = [pair for kind in KINDS
            for pair in beside(runs.of("predict", kind), runs.of("overlap", kind), "both_seconds")]
    worst = sorted(both, key=lambda pair: abs(pair[0][0] / pair[0][1] - 1))[-1:]
    return {"predict.train_step": step, "predict.overlap": worst}


def checks(runs):
    passed = counted(runs.of("conformance"), lambda said: said["passed"],
                     lambda said: said["passed"] + said["failed"])
    figures = {"conformance.cuda": passed}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        clean = counted(runs.of("sanitizer", tool), lambda said: int(said["clean"]))
        figures[f"sanitizer.{tool}"] = clean
    return figures


# ---- what is asked, and what comes of it ----


def required():
    for path in (HERE / "required.json", HERE.parent / "benches" / "results" / "required.json"):
        if path.exists():
            asked = json.loads(path.read_text())["figures"]
            # What tests said, and no program of the bundle, is entered by hand from their logs.
            return {each["name"]: each for each in asked if not each["name"].startswith("proof.")}
    raise Wrong(f"no required.json beside {HERE} or in benches/results")


def badness(better, ratio):
    """Larger is worse."""
    return {"lower": ratio, "higher": -ratio, "near": abs(ratio - 1)}[better]


def reaches(figure):
    ratio, threshold = figure["ratio"], figure["threshold"]
    return badness(figure["better"], ratio) <= (-threshold if figure["better"] == "higher"
                                                else threshold)


def is_longest(name):
    """latency.longest, link.longest-held: a bound that each call must keep to."""
    return name.rsplit(".", 1)[-1].startswith("longest")


def figure(asked, pairs, count, machine):
    """The middle pair as a figure, in full; of longest times the worst one."""
    by_ratio = sorted(pairs, key=lambda pair: badness(asked["better"], pair[0][0] / pair[0][1]))
    middle = len(pairs) // 2
    (value, reference), command = by_ratio[-1 if is_longest(asked["name"]) else middle]
    return {
        "name": asked["name"], "value": value, "unit": asked["unit"], "reference": reference,
        "ratio": float(f"{value / reference:.7g}"), "threshold": asked["threshold"],
        "better": asked["better"], "date": machine.date, "hardware": machine.hardware,
        "driver": machine.driver, "commit": machine.commit, "command": command,
        **({"pairs": count} if count else {}),
    }


def sign(better):
    return {"lower": "<=", "higher": ">=", "near": "1 +-"}[better]


def table(asked, made):
    rows = [("figure", "value", "raw or bound", "ratio", "asked", "pairs", "")]
    for name, wanted in asked.items():
        bound = f"{sign(wanted['better'])} {wanted['threshold']}"
        if name not in made:
            rows.append((name, "-", "-", "-", bound, "0", "not measured"))
            continue
        one = made[name]
        rows.append((name, f"{one['value']:.6g} {one['unit']}", f"{one['reference']:.6g}",
                     f"{one['ratio']:.4f}", bound, str(one.get("pairs", "-")),
                     "" if reaches(one) else "SHORT"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def written(figures):
    return "[\n" + ",\n".join("  " + json.dumps(one) for one in figures) + "\n]\n"


def add(figures, machine, folder, results):
    path = results / f"{machine.file()}.json"
    old = json.loads(path.read_text()) if path.exists() else []
    names = {one["name"] for one in figures}
    kept = [one for one in old if one["name"] not in names]
    path.write_text(written(sorted(kept + figures, key=lambda one: one["name"])))
    with open(results / f"{machine.file()}.log", "a") as log:
        log.write(read(folder / "machine.txt") + read(folder / "all.log"))
    print(f"{len(figures)} figures are in {path}; tools/picture.py draws them anew")


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("folder", type=pathlib.Path)
    words.add_argument("--into", type=pathlib.Path, metavar="RESULTS")
    words.add_argument("--rehearsal", action="store_true")
    options = words.parse_args()
    if options.rehearsal and options.into:
        raise Wrong("--rehearsal: what was rehearsed is no result")
    machine = Machine(options.folder, options.rehearsal)
    runs = Runs(options.folder, options.rehearsal)
    asked = required()
    pairs = {**train(runs), **first(runs), **overlap(runs), **told(runs, asked),
             **allocator(runs), **predict(runs), **checks(runs)}
    unknown = [name for name in pairs if name not in asked]
    if unknown:
        raise Wrong(f"required.json asks nothing of {', '.join(unknown)}")
    counts = {**{name: len(of) for name, of in pairs.items()}, **overlap_runs(runs)}
    made = {name: figure(asked[name], of, counts[name], machine)
            for name, of in pairs.items() if of}
    table({name: asked[name] for name in pairs}, made)
    figures = list(made.values())
    (options.folder / "figures.json").write_text(written(figures))
    if options.into:
        add(figures, machine, options.folder, options.into)


if __name__ == "__main__":
    try:
        main()
    except Wrong as wrong:
        sys.exit(f"figures.py: {wrong}")
