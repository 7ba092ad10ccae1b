"""Too little pinned memory, too little memory on the device: the fault guarded against is a step
that ends, or a wrong byte. Tensors stay, or are fetched when they are wanted, and the report says
so.
"""

from __future__ import annotations

import time
import warnings

import harness
import lightering
import models
import pytest
import rig as rigs
import torch
from lightering._ownership import identity_of
from lightering.torch import HiddenStates, _memory
from rig import rig  # noqa: F401
from saving import leaf, save


@pytest.mark.parametrize("kind", rigs.DEVICES)
@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
def test_without_pinned_room_tensors_stay_and_the_report_says_so(kind, mode, how):
    small = rigs.make(kind, pinned_bytes="4KiB")
    context = getattr(small, mode)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        way = harness.Way(mode, lambda: context)
        harness.compare(
            lambda: models.moe(small.device, checkpoint=how), harness.one_step, way)
    report = context.report()
    assert report.kept["no pinned room"] > 0, report
    small.assert_nothing_left()


def test_a_prefetch_that_finds_no_room_is_not_issued(rig, monkeypatch):  # noqa: F811
    room = rig.desk.room
    monkeypatch.setattr(type(room), "has", lambda self, nbytes: False)
    for how in ("none", "positional"):
        saved, hidden = rig.saved(), rig.hidden()
        harness.compare(
            lambda how=how: models.dense(rig.device, checkpoint=how), harness.one_step,
            harness.Way("saved", lambda saved=saved: saved),
            harness.Way("hidden", lambda hidden=hidden: hidden))
    stats = rig.engine.stats()
    assert stats["prefetched_bytes"] == 0 and stats["miss_count"] > 0


def test_a_fetch_that_finds_no_room_gives_up_what_was_fetched_ahead(rig, monkeypatch):  # noqa: F811
    room = rig.desk.room
    take, asked = type(room).take, []

    def short(self, nbytes, layout=None):
        asked.append(nbytes)
        # Every third time, on demand or ahead, and never twice in a row.
        if len(asked) % 3 == 0:
            asked.append(0)
            raise torch.OutOfMemoryError("a test takes the room away")
        return take(self, nbytes, layout)

    monkeypatch.setattr(type(room), "take", short)
    saved = rig.saved()
    harness.compare(
        lambda: models.moe(rig.device, checkpoint="none"), harness.STEPS["two_forwards"],
        harness.Way("saved", lambda: saved))
    assert len(asked) > 30


@pytest.mark.parametrize("arrived", [False, True])
def test_what_was_fetched_ahead_makes_room_for_a_reader(rig, monkeypatch, arrived):  # noqa: F811
    """On a device that has room for two of the four tensors."""
    room, made = rig.desk.room, [torch.full((1024,), float(index)) for index in range(4)]
    take, taken = type(room).take, []

    def short(self, nbytes, layout=None):
        if 4096 * len([each for each in taken if each() is not None]) + nbytes > 2 * 4096:
            raise torch.OutOfMemoryError("there is room for two")
        found = take(self, nbytes, layout)
        taken.append(identity_of(found[0]))
        return found

    def step(order):
        x, seen = leaf(rig.device), []
        with rig.saved():
            outs = [save(x, [one.clone().to(rig.device)], seen) for one in made]
            rig.desk.flush()
            for index in order:
                if arrived:
                    rig.engine.drain()
                outs[index].sum().backward()
                assert torch.equal(seen[-1][0].cpu(), made[index])
                del seen[:-1]
        return rig.engine.stats()["wasted_bytes"]

    before = step((3, 2, 1, 0))
    monkeypatch.setattr(type(room), "take", short)
    assert step((3, 0, 2, 1)) > before


def test_a_reader_that_finds_no_room_at_all_can_ask_again(rig, monkeypatch):  # noqa: F811
    room = rig.desk.room
    x, seen = leaf(rig.device), []
    with rig.saved():
        out = save(x, [torch.full((256,), 7.0, device=rig.device)], seen)
        out = save(out, [torch.randn(256, device=rig.device)], [])
        rig.desk.flush()
        with monkeypatch.context() as patch:
            def none(self, nbytes, layout=None):
                raise torch.OutOfMemoryError("a test takes the room away")

            patch.setattr(type(room), "take", none)
            with pytest.raises(torch.OutOfMemoryError):
                out.sum().backward(retain_graph=True)
        out.sum().backward()
    assert torch.equal(seen[-1][0], torch.full((256,), 7.0, device=rig.device))


def test_a_step_of_little_in_all_stays_and_says_so_and_a_longer_one_moves(rig):  # noqa: F811
    """Inputs of a few megabytes took the host longer than the copies, and freed next to nothing."""
    context = HiddenStates(min_bytes=16, engine=rig.engine, min_step_bytes=4 * 4 * 1000)
    gradients = []

    def step(count):
        x = torch.full((count,), 0.5, device=rig.device, requires_grad=True)
        value = x * 1
        for _ in range(4):
            value = torch.utils.checkpoint.checkpoint(torch.sin, value, use_reentrant=False)
        value.sum().backward()
        gradients.append(x.grad[:100].clone())

    def moved(count):
        with context:
            step(count)
        return context.report().moved

    # What a step has in all is known after it.
    assert moved(100) == 3 * 400
    with pytest.warns(UserWarning, match="moved nothing: all 1600 bytes .*: too little in a step"):
        assert moved(100) == 0
    assert context.report().kept == {"too little in a step": 1600}
    # Of this one three inputs are as much as may stay, and the fourth is the last one.
    assert moved(1100) == 0
    assert context.report().kept == {"too little in a step": 3 * 4400, "among the last": 4400}
    assert moved(1100) == 3 * 4400 and moved(100) == 3 * 400
    # Once it is more than that, what comes leaves in the same step.
    assert moved(1500) == 6000
    # Within one context, too, a step is over when nothing of it is saved any more.
    with context:
        for _ in range(3):
            step(100)
    assert context.report().moved == 3 * 400
    assert all(harness.same_bits(each, gradients[0]) for each in gradients)
    rig.assert_nothing_left()


def test_a_context_for_each_step_learns_from_the_one_before(rig):  # noqa: F811
    """Each knew of no step before its own, and moved what others would have let stay."""
    moved = []
    for count in (100, 100, 4100, 4100, 100, 100):
        context = HiddenStates(min_bytes=16, engine=rig.engine, min_step_bytes=16000)
        x = torch.full((count,), 0.5, device=rig.device, requires_grad=True)
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = x * 1
            for _ in range(4):
                value = torch.utils.checkpoint.checkpoint(torch.sin, value, use_reentrant=False)
            value.sum().backward()
        moved.append(context.report().moved)
    # The first long one is over the bound with its first input.
    assert moved == [3 * 400, 0, 3 * 16400, 3 * 16400, 3 * 400, 0]
    del value, x, context
    rig.assert_nothing_left()


@pytest.mark.parametrize("options, is_bounded", [({}, True), ({"unreleased_bytes": "1MiB"}, False)])
def test_a_256th_of_the_device_is_little_where_nothing_else_was_chosen(options, is_bounded):
    rigs.gpu_or_skip()
    context = HiddenStates(engine=lightering.Engine("cuda:0", **options))
    memory = torch.cuda.get_device_properties(0).total_memory
    assert context._least_of_step(torch.device("cuda", 0)) == (memory // 256) * is_bounded
    assert HiddenStates(engine=lightering.Engine("sim"))._least_of_step(torch.device("cpu")) == 0


def fakes(monkeypatch, cached, free):
    """A room on a device whose figures are these; and what was asked for so far."""
    asked = []

    def stats(device):
        asked.append("cache")
        return {"reserved_bytes": {"all": {"current": 7 + cached}},
                "allocated_bytes": {"all": {"current": 7}}}

    def info(device):
        asked.append("driver")
        return free, free

    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    return _memory.Room("cuda", 0), asked


def test_room_is_read_seldom_and_the_driver_asked_only_where_the_cache_does_not_do(monkeypatch):
    room, asked = fakes(monkeypatch, cached=1 << 30, free=0)
    assert all(room.has(1 << 20) for _ in range(32))
    assert asked == ["cache"] * 2 and room.refused_count == 0
    # What was promised is counted until the next reading.
    room, asked = fakes(monkeypatch, cached=3 << 20, free=0)
    assert [room.has(1 << 20) for _ in range(3)] == [True] * 3 and asked == ["cache"]
    assert room.has(1 << 20) and asked == ["cache"] * 2


def test_room_that_neither_the_cache_nor_the_device_has_is_refused_and_counted(monkeypatch):
    margin = _memory._MARGIN_BYTES
    room, asked = fakes(monkeypatch, cached=100, free=margin + 1000)
    assert room.has(1000) and asked == ["cache", "driver"]
    room, asked = fakes(monkeypatch, cached=100, free=margin + 999)
    assert not room.has(1000) and not room.has(1000) and room.refused_count == 2
    assert room.has(100)


def test_the_figures_of_a_device_are_those_of_torch():
    rigs.gpu_or_skip()
    room, keep = _memory.Room("cuda", 0), torch.empty(64 << 20, device="cuda")
    del keep
    assert room.has(1) and room._spare + 1 == (
        torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)) > 0


SCRIPT = """
    def run(context):
        torch.manual_seed(1)
        w = torch.randn(512, 512, device=device, requires_grad=True)
        y = torch.randn(512, 512, device=device)
        with context:
            for _ in range(8):
                y = torch.tanh(y @ w)
            y.square().mean().backward()
        return w.grad
    torch.use_deterministic_algorithms(True)
    import contextlib
    context = SavedTensors(min_bytes=1024, engine=engine)
    plain, again = run(contextlib.nullcontext()), run(contextlib.nullcontext())
    assert torch.equal(plain, again), "void"
    print(torch.equal(plain, run(context)), context.report().released > 0)
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_of_torch_are_served_alike(setting, monkeypatch):
    rigs.gpu_or_skip()
    from test_lives import run_script

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    found = run_script(SCRIPT, device="cuda:0")
    assert (found.returncode, found.stdout) == (0, "True True\n"), found.stderr


def test_a_device_that_is_not_there_is_an_error_of_this_package():
    with pytest.raises(lightering.Unavailable):
        lightering.Engine("sim:99")
    assert issubclass(lightering.Unavailable, lightering.Error)


def test_a_batch_longer_than_all_before_leaves_as_well():
    """The pool grew in the first step alone: all that a longer one had more stayed for good."""
    found = rigs.make("sim")
    context = found.hidden(keep_last=0)
    for tokens in (16, 1 << 16):
        x = torch.ones(tokens, 64, requires_grad=True)
        with context:
            value = x * 1
            for _ in range(8):
                value = torch.utils.checkpoint.checkpoint(torch.sin, value, use_reentrant=False)
            report = context.report()
            value.sum().backward()
        assert (report.moved, report.kept) == (8 * tokens * 64 * 4, {}), report
    del value
    found.assert_nothing_left()



@pytest.mark.parametrize("kind", rigs.DEVICES)
def test_pinned_memory_is_reserved_before_a_step_and_not_in_it(kind):
    found = rigs.make(kind)
    free = found.engine.stats()["pinned_free_bytes"]
    wanted = free + (8 << 20)
    assert found.engine.reserve(wanted) >= 8 << 20
    assert found.engine.reserve(f"{wanted}") == 0, "it is there already"
    begun = found.engine.reserve(wanted + (8 << 20), background=True)
    assert begun >= 8 << 20
    while (progress := found.engine.stats()["reserve"])["state"] == "running":
        time.sleep(0.01)
    assert progress["state"] == "done" and progress["ready_bytes"] == begun
    grown = found.engine.stats()["pinned_growth_count"]
    with found.saved():
        harness.loss_of(models.dense(found.device, checkpoint="none")).backward()
    assert found.engine.stats()["pinned_growth_count"] == grown
    with pytest.raises(lightering.OverBudget):
        found.engine.reserve("900TiB")
    found.assert_nothing_left()


def test_later_passes_over_a_graph_that_is_kept_are_fetched_ahead(rig):  # noqa: F811
    """The window filled with what had just been read, and every later reader had to ask."""
    x, window = leaf(rig.device), 2 * 4096
    out, seen = x, []
    rig.desk.native.set_windows(4096, window)
    rig.desk._window = window
    with rig.saved():
        for index in range(40):
            out = save(out, [torch.full((1024,), float(index), device=rig.device)], seen)
        rig.desk.flush()
        for turn in range(4):
            before = rig.engine.stats()
            out.sum().backward(retain_graph=turn < 3)
            now = rig.engine.stats()
            asked = now["miss_count"] - before["miss_count"]
            assert asked <= 2, f"pass {turn}: {asked} of 40 tensors were not fetched ahead"
    assert [int(each[0][0]) for each in seen] == list(range(39, -1, -1)) * 4
    rig.assert_nothing_left()


def test_what_rests_of_a_kept_graph_goes_down_to_the_window_however_few_they_are(rig):  # noqa: F811
    """Two of any size were let be, and so more than the window of large ones."""
    out, nbytes = leaf(rig.device), 16384
    rig.desk.native.set_windows(nbytes, nbytes)
    rig.desk._window = nbytes
    with rig.saved():
        for _ in range(3):
            out = save(out, [torch.ones(nbytes // 4, device=rig.device)], [])
        rig.engine.drain()
        rig.desk.flush()
        out.sum().backward(retain_graph=True)
        assert len(rig.desk._finished) == 3
        rig.desk.rest(nbytes)
        assert len(rig.desk._finished) == 1
    del out
    rig.assert_nothing_left()
