"""A report that means something else than it says: the faults guarded against are reasons that are
documented nowhere, figures of other steps and engines, and warnings that point into a library.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import harness
import lightering
import lightering.torch
import models
import pytest
import torch
from lightering import _native
from lightering.torch import _reasons, _warn
from lightering.torch._report import Report
from lightering.torch._reasons import REASONS
from rig import rig  # noqa: F401
from saving import leaf, save

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(_warn, "_told", set())


def readme() -> str:
    if not README.exists():
        pytest.skip("not run: README.md is not here, only the wheel")
    return README.read_text()


def test_every_reason_of_a_report_is_documented_in_the_readme():
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", readme(), re.MULTILINE)
    told = {reason: meaning for reason, meaning in rows if reason in REASONS}
    assert told == REASONS
    # A row of the same table that no code can give is as wrong.
    table = readme().partition("| reason | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(REASONS)


def test_every_reason_that_the_engine_gives_is_known():
    assert len(_native.KEPT) >= 4 and set(_native.KEPT) < set(REASONS)


def test_no_reason_is_written_out_where_it_is_used():
    """So that the list is complete: each use is by its name in ``_reasons``."""
    package, found = Path(lightering.torch.__file__).parent, set()
    names = {name for name in vars(_reasons) if name.isupper() and name != "REASONS"}
    assert {getattr(_reasons, name) for name in names} == set(REASONS)
    for path in package.glob("*.py"):
        if path.name == "_reasons.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in REASONS:
                assert False, f"{path.name}:{node.lineno}: {node.value!r}"
            if isinstance(node, ast.Attribute) and node.attr in names:
                found.add(node.attr)
    # Words of the engine come as it says them.
    assert found == names - {"LANE_FULL"}


def test_every_error_of_the_package_is_named_in_the_readme_and_is_a_runtime_error():
    """Two were raised that are no `lightering.Error`, of which the page said that all are."""
    told = readme().partition("\n## Errors")[2].partition("\n## ")[0]
    kinds = [each for each in vars(lightering).values()
             if isinstance(each, type) and issubclass(each, lightering.Error)]
    assert len(kinds) >= 10 and issubclass(lightering.Error, RuntimeError)
    assert [each.__name__ for each in kinds if f"{each.__name__}`" not in told] == []
    for path in Path(lightering.torch.__file__).parent.glob("*.py"):
        assert "raise RuntimeError" not in path.read_text(), path.name


def test_every_field_of_a_report_is_documented_in_the_readme():
    for name in lightering.torch.Report.__dataclass_fields__:
        assert f"`{name}`" in readme(), name


def test_help_explains_every_field_of_a_report_and_every_figure():
    attributes = set(re.findall(r"^    +(\w+): ", inspect.getdoc(Report) or "", re.MULTILINE))
    assert attributes == {each.name for each in dataclasses.fields(Report)}
    told = set(re.findall(r"``(\w+)``", inspect.getdoc(lightering.Engine.stats) or ""))
    figures = set(lightering.Engine(device="sim").stats())
    # It also names what switches a figure on.
    assert told - figures == {"time_stalls", "verify"} and figures <= told


def test_the_longest_call_is_of_two_steps_and_of_none_that_was_asked_to_wait(rig):  # noqa: F811
    with rig.saved():
        (leaf(rig.device) * 2).sin().sum().backward()
    rig.engine.drain()
    stats = rig.engine.stats()
    assert stats["longest_verb_seconds"] > 0 and stats["longest_verb"] not in ("", "drain")
    for _ in range(2):
        rig.desk.native.mark_step()
    assert rig.engine.stats()["longest_verb"] in ("mark_step", "stats")


def test_stalls_and_refused_prefetches_are_those_of_the_step(rig, monkeypatch):  # noqa: F811
    """Not of all steps since the engine was made."""
    monkeypatch.setattr(type(rig.desk.room), "has", refuse)
    steps = []
    context = rig.hidden()
    for _ in range(3):
        with context:
            harness.loss_of(models.dense(rig.device)).backward()
        steps.append(context.report())
    assert steps[0].stall_count > 0
    # Each fetched on demand what the first did, and the engine counted on.
    assert steps[1].stall_count == steps[2].stall_count <= steps[0].stall_count
    assert steps[2].engine["stall_count"] == sum(step.stall_count for step in steps)
    assert steps[2].prefetch_refused_count == steps[1].prefetch_refused_count
    with context:
        pass
    idle = context.report()
    assert (idle.stall_count, idle.stall_seconds, idle.prefetch_refused_count) == (0, 0.0, 0)
    assert idle.engine["stall_count"] > 0
    with rig.saved() as other:
        save(leaf(rig.device), [torch.ones(64, device=rig.device)], []).sum().backward()
    assert other.report().stall_count <= 1


def refuse(room, nbytes):
    room.refused_count += 1
    return False


def test_steps_of_wrapped_modules_count_their_own_stalls(rig, monkeypatch):  # noqa: F811
    monkeypatch.setattr(type(rig.desk.room), "has", refuse)
    counts = []
    for _ in range(3):
        x = torch.randn(8, 64, device=rig.device, requires_grad=True)
        for _ in range(4):
            x = lightering.torch.checkpoint(torch.nn.functional.gelu, x, engine=rig.engine)
        rig.desk.flush()
        x.sum().backward()
        counts.append(lightering.torch.report(rig.engine).stall_count)
    assert counts[0] > 0 and len(set(counts)) == 1, counts


def line_of(word: str) -> int:
    """The line of this file in which a comment has this word."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.endswith(f"# {word}"))


def test_a_warning_names_the_line_of_the_user(rig):  # noqa: F811
    with pytest.warns(UserWarning, match="moved nothing") as told:
        with rig.saved(min_bytes="1GiB"):  # enters
            (leaf(rig.device) * 2).sin().sum().backward()
        with rig.hidden():  # enters too
            (leaf(rig.device) * 2).sin().sum().backward()
    ours = [each for each in told if "lightering" in str(each.message)]
    assert [Path(each.filename).name for each in ours] == ["test_report.py"] * 2
    assert [each.lineno for each in ours] == [line_of("enters"), line_of("enters too")]


def test_a_warning_out_of_a_hook_names_the_line_that_saved():
    """With a library's frames, and this package's own, between the two."""
    library = {"__name__": "torch.nn.modules.some"}
    exec("def forward(hook): hook()", library)
    package = {"__name__": "lightering.torch._some", "warn_once": _warn.warn_once}
    exec("def hook(): warn_once('a mode', 'a test says so')", package)
    with pytest.warns(UserWarning, match="a mode: a test says so") as told:
        library["forward"](package["hook"])  # saves
    (one,) = told
    assert (Path(one.filename).name, one.lineno) == ("test_report.py", line_of("saves"))


def test_a_warning_of_a_wrapped_module_names_the_line_of_its_call(rig):  # noqa: F811
    def call(x):
        return lightering.torch.checkpoint(torch.sin, x, engine=rig.engine)  # calls

    with pytest.warns(UserWarning, match="moved nothing") as told:
        for _ in range(2):
            call(torch.ones(2, device=rig.device, requires_grad=True)).sum().backward()
    (one,) = [each for each in told if "lightering" in str(each.message)]
    assert (Path(one.filename).name, one.lineno) == ("test_report.py", line_of("calls"))


def test_what_is_over_the_budget_is_said_once():
    engine = lightering.Engine("sim")
    with pytest.raises(lightering.OverBudget) as raised:
        engine.reserve("900TiB")
    text = str(raised.value)
    assert "over the pinned-memory budget" in text and "[900.00 TiB]" in text
    assert text.count("budget") == 1, text


def test_a_reservation_is_the_pools_and_the_bound_is_the_engines():
    small, large = (lightering.Engine("sim", pinned_bytes=size) for size in ("64KiB", "auto"))
    free = small.stats()["pinned_free_bytes"]
    small.reserve(free + (1 << 20))
    for engine in (small, large):
        assert engine.stats()["pinned_free_bytes"] >= free + (1 << 20)
    assert small.stats()["pinned_engine_budget_bytes"] == 64 << 10
    assert large.stats()["pinned_engine_budget_bytes"] == large.stats()["pinned_budget_bytes"]
    x, context = leaf("cpu"), lightering.torch.SavedTensors(min_bytes=1, engine=small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            for _ in range(4):
                x = save(x, [torch.randn(8 << 10)], [])
    assert context.report().kept[_reasons.NO_PINNED_ROOM] == 2 * (32 << 10)
    held = small.stats()["pinned_engine_bytes"]
    assert held == 64 << 10 and large.stats()["pinned_engine_bytes"] == 0
    x.sum().backward()
