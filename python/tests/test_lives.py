"""Something that outlives its graph, or dies before its copy: the fault guarded against.

Graphs that are dropped, branches that nobody reads, exceptions anywhere, the end of the process,
children of a fork, contexts within contexts.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import warnings

import harness
import lightering.torch
import models
import pytest
import torch
from rig import MODES, rig  # noqa: F401
from saving import leaf, save



def forward(rig, seed=0, how="positional"):  # noqa: F811
    model = models.dense(rig.device, checkpoint=how)
    return model, harness.loss_of(model, seed)


@pytest.mark.parametrize("mode", MODES)
def test_no_grad_moves_nothing_and_keeps_nothing(rig, mode):  # noqa: F811
    with getattr(rig, mode)() as context, torch.no_grad():
        forward(rig)
    report = context.report()
    assert report.offered == report.moved == 0 and not report.kept
    assert rig.engine.stats()["evicted_count"] == 0 and rig.desk.held_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_dropped_gives_its_blocks_back_at_once(rig, mode):  # noqa: F811
    with getattr(rig, mode)() as context:
        _, loss = forward(rig, how="positional")
        assert context.report().moved > 0
        del loss, _
        # No garbage collection: dropping the graph has to be enough.
        assert rig.desk.live_count == 0
        rig.engine.drain()
        rig.desk.sweep()
        stats = rig.engine.stats()
        assert stats["storage_count"] == 0 and rig.desk.held_bytes == 0
        assert stats["pinned_lent_bytes"] == 0 or rig.kind == "cuda"


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_an_exception_drops_leaves_the_exception_alone(rig, mode):  # noqa: F811
    """The hooks' destructors called Python while it was on its way: the process crashed."""

    def fail():
        raise Planned("mine")

    for _ in range(3):
        with getattr(rig, mode)() as context:
            with pytest.raises(Planned, match="mine"):
                # The loss is nobody's but the interpreter's when the exception comes.
                str((forward(rig)[1], fail()))
            assert context.report().moved > 0
        assert rig.desk.live_count == 0
    rig.assert_nothing_left()


def test_a_graph_that_is_read_for_ever_is_in_the_books_once(rig):  # noqa: F811
    """Each reading entered its storages anew, and the next one looked at all of them."""
    with rig.saved():
        _, loss = forward(rig)
    for _ in range(20):
        loss.backward(retain_graph=True)
        finished = rig.desk._finished
        assert finished and len(finished) == len(set(finished)) <= rig.desk.live_count
    del loss, _
    rig.assert_nothing_left()


def test_unused_branches_are_given_up_with_the_graph(rig):  # noqa: F811
    x, seen = leaf(rig.device), []
    with rig.saved():
        unused = save(x, [torch.randn(256, device=rig.device)], [])
        used = save(x, [torch.randn(256, device=rig.device)], seen)
        used.sum().backward()
    assert len(seen) == 1 and rig.desk.live_count == 1
    del unused, used
    assert rig.desk.live_count == 0


class Planned(Exception):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "layer", "backward", "hook"])
def test_after_an_exception_everything_is_usable_again(rig, mode, where):  # noqa: F811
    context = getattr(rig, mode)()
    model = models.dense(rig.device, checkpoint="positional")
    wanted = harness.compare(lambda: models.dense(rig.device), harness.one_step)

    def fail(*_):
        raise Planned

    with pytest.raises(Planned), context:
        if where == "layer":
            handle = model.layers[1].register_forward_pre_hook(fail)
        loss = harness.loss_of(model) if where != "layer" else None
        if where == "forward":
            raise Planned
        if where == "layer":
            try:
                harness.loss_of(model)
            finally:
                handle.remove()
        if where == "hook":
            handle = model.layers[0].register_full_backward_hook(fail)
            try:
                harness.loss_of(model).backward()
            finally:
                handle.remove()
        hidden = torch.ones(4, device=rig.device, requires_grad=True)
        hidden.register_hook(fail)
        (loss + hidden.sum()).backward()
    loss = hidden = model = None  # noqa: F841
    gc.collect()
    way = harness.Way(mode, lambda: context)
    found = harness.run(lambda: models.dense(rig.device), harness.one_step, way)
    assert not harness.differences(wanted, found)
    rig.assert_nothing_left()


def test_a_pack_that_fails_leaves_the_tensor_where_it_is(rig, monkeypatch):  # noqa: F811
    import lightering

    x, seen = leaf(rig.device), []
    context = rig.saved()
    saved = context._modes[torch.device(rig.device)][1]

    class Refusing:
        largest = 0

        def pack(self, *_):
            raise lightering.Busy("pack: busy, try again later: it is a test")

    context._modes[torch.device(rig.device)] = (rig.desk, Refusing())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            save(x, [torch.ones(64, device=rig.device)], seen).sum().backward()
    assert list(context.report().kept) == ["refused: pack: busy, try again later: it is a test"]
    assert torch.equal(seen[0][0], torch.ones(64, device=rig.device)) and saved is not None


@pytest.mark.parametrize("mode", MODES)
def test_contexts_within_contexts_and_entered_again(rig, mode):  # noqa: F811
    one, two = getattr(rig, mode)(), rig.saved()

    def step(model, _):
        with one, two, one:
            loss = harness.loss_of(model)
            loss.backward()
        with one:
            again = harness.loss_of(model, 1)
        with one:
            again.backward()
        return [loss, again]

    def plain(model, _):
        losses = []
        for seed in range(2):
            losses.append(harness.loss_of(model, seed))
            losses[-1].backward()
        return losses

    make = lambda: models.moe(rig.device)  # noqa: E731
    wanted = harness.compare(make, plain)
    assert not harness.differences(wanted, harness.run(make, step, harness.PLAIN))


def test_a_context_that_one_thread_left_is_still_entered_in_another(rig):  # noqa: F811
    context = rig.saved()
    inside, leave = threading.Event(), threading.Event()
    found = []

    def other():
        with context:
            inside.set()
            leave.wait(60)
            x, seen = leaf(rig.device), []
            save(x, [torch.ones(64, device=rig.device)], seen).sum().backward()
            found.append(rig.engine.stats()["evicted_count"])

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            pass
    leave.set()
    thread.join()
    assert found == [1]


@pytest.mark.parametrize("mode", MODES)
def test_a_context_that_was_never_entered_cannot_be_left(rig, mode):  # noqa: F811
    context = getattr(rig, mode)()
    with pytest.raises(lightering.Usage, match="left in a thread that has not entered it"):
        context.__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            pass


@pytest.mark.parametrize("other", ["saved", "hidden", "torch"])
@pytest.mark.parametrize("mode", MODES)
def test_contexts_left_in_the_order_they_were_entered_say_so(rig, mode, other):  # noqa: F811
    """They were left in silence, while each had taken the hooks of the other away."""
    outer = getattr(rig, mode)()
    inner = (torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
             if other == "torch" else getattr(rig, other)())
    layers = sys.modules.get("transformers.modeling_layers")
    kind = getattr(layers, "GradientCheckpointingLayer", torch.nn.Module)
    before = kind.__call__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(lightering.Usage, match="left before what was entered after it"):
            outer.__exit__(None, None, None)
        # Each has taken its own hooks off, and no others.
        inner.__exit__(None, None, None)
        assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert kind.__call__ is before
        with outer, outer:
            save(leaf(rig.device), [torch.ones(64, device=rig.device)], []).sum().backward()


def test_an_exception_that_leaves_contexts_out_of_order_is_the_one_raised(rig):  # noqa: F811
    outer, inner = rig.saved(), rig.hidden()
    outer.__enter__()
    inner.__enter__()
    error = ValueError("first")
    for each in (outer, inner):
        each.__exit__(ValueError, error, None)
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_the_call_of_layers_is_as_it_was_after_the_context(rig):  # noqa: F811
    layers = pytest.importorskip("transformers.modeling_layers")
    kind = layers.GradientCheckpointingLayer
    before = kind.__dict__.get("__call__"), kind.__call__
    for _ in range(3):
        with rig.hidden(), rig.hidden():
            assert kind.__call__ is not before[1]
            with torch.no_grad():
                models.qwen3(rig.device)(**models.batch(device=rig.device))
        assert (kind.__dict__.get("__call__"), kind.__call__) == before
        model = models.qwen3(rig.device).eval()
        model.generate(**{"input_ids": models.batch(device=rig.device)["input_ids"]},
                       max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(Planned), rig.hidden():
        raise Planned
    assert (kind.__dict__.get("__call__"), kind.__call__) == before


def test_a_call_of_layers_that_somebody_else_sets_meanwhile_stays(rig, monkeypatch):  # noqa: F811
    """Whoever patches layers inside of a context, such as with faster kernels, lost that."""
    kind = pytest.importorskip("transformers.modeling_layers").GradientCheckpointingLayer
    monkeypatch.setattr(kind, "__call__", kind.__call__)
    with rig.hidden():
        inner = kind.__call__

        def theirs(layer, *args, **kwargs):
            return inner(layer, *args, **kwargs)

        kind.__call__ = theirs
    assert kind.__call__ is theirs
    with rig.hidden():
        assert kind.__call__ is not theirs
    assert kind.__call__ is theirs


def run_script(body: str, *, device: str) -> subprocess.CompletedProcess[str]:
    head = f"""
        import gc, os, sys, torch, lightering
        from lightering.torch import SavedTensors, HiddenStates
        from lightering.torch._stash import Desk
        device = {device!r}
        engine = lightering.Engine("sim" if device == "cpu" else device)
        x = torch.ones(256, 256, device=device, requires_grad=True)
    """
    text = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)


def test_the_interpreter_ends_quietly_with_graphs_alive(rig):  # noqa: F811
    found = run_script("""
        context = SavedTensors(min_bytes=16, engine=engine)
        context.__enter__()
        y = (x * 2).sin().exp().sum()
        print(context.report().moved > 0)
    """, device=rig.device)
    assert (found.returncode, found.stdout, found.stderr) == (0, "True\n", "")


def test_a_child_of_a_fork_drops_what_it_has_and_touches_no_device(rig):  # noqa: F811
    found = run_script("""
        with SavedTensors(min_bytes=16, engine=engine) as context:
            y = (x * 2).sin().exp().sum()
            one = torch.ones_like(y)
            child = os.fork()
            if child == 0:
                z = (torch.ones(64, requires_grad=True) * 2).sin().sum()
                z.backward()  # Still inside of the context: everything stays.
                context.__exit__(None, None, None)
                try:
                    y.backward(one)
                    os._exit(5)
                except lightering.Usage as error:
                    if "forked" not in str(error):
                        os._exit(6)
                except RuntimeError:
                    # torch itself refuses before that, where the device is a real one.
                    if not y.is_cuda:
                        os._exit(7)
                del y
                gc.collect()
                try:
                    engine.stats()
                except lightering.Usage as error:
                    os._exit(0 if "forked" in str(error) else 3)
                os._exit(4)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            y.backward()
        print(status, torch.isfinite(x.grad).all().item())
    """, device=rig.device)
    assert (found.returncode, found.stdout) == (0, "0 True\n"), found.stderr


def test_a_child_of_a_fork_runs_its_parents_wrapped_layers(rig):  # noqa: F811
    """In either order of wrappers, by single calls, and in a context; what they save stays."""
    found = run_script("""
        from lightering.torch import checkpoint, offload_wrapper
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        one, two = (torch.nn.Linear(8, 8) for _ in range(2))
        layers = [offload_wrapper(checkpoint_wrapper(one), engine=engine),
                  checkpoint_wrapper(offload_wrapper(two, engine=engine))]

        def step():
            hidden = torch.ones(4, 8, requires_grad=True) * 1
            for layer in layers:
                hidden = checkpoint(torch.sin, layer(hidden), engine=engine)
            # A backward begins threads for each GPU there is, after which torch refuses one in a
            # child, whatever its tensors are on.
            if not torch.cuda.is_available():
                hidden.sum().backward()
            found = [hidden] + [layer.weight.grad for layer in (one, two)]
            one.weight.grad = two.weight.grad = None
            return [each.detach().clone() for each in found if each is not None]

        wanted = step()
        context = HiddenStates(min_bytes=16, engine=engine)
        context.__enter__()
        loss = torch.utils.checkpoint.checkpoint(torch.sin, x * 2, use_reentrant=False).sum()
        child = os.fork()
        if child == 0:
            same = all(map(torch.equal, wanted, step()))
            context.__exit__(None, None, None)
            os._exit(0 if same else 3)
        context.__exit__(None, None, None)
        loss.backward()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """, device=rig.device)
    assert (found.returncode, found.stdout) == (0, "0\n"), found.stderr


@pytest.mark.parametrize("parent", ["import lightering", "theirs = lightering.Engine('sim')"])
def test_a_child_of_a_fork_trains_with_an_engine_of_its_own(parent):
    """Of a parent that trained, or that imported this package and did no more."""
    own = "Engine.of('sim')" if parent.startswith("import") else "Engine('sim', seed=3)"
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(f"""
        import os, torch, lightering
        from lightering.torch import SavedTensors
        {parent}
        child = os.fork()
        if child == 0:
            x = torch.ones(256, 256, requires_grad=True)
            context = SavedTensors(min_bytes=16, engine=lightering.{own})
            with context:
                y = (x * 2).sin().exp().sum()
            y.backward()
            os._exit(0 if context.report().moved == 2 * 4 * 256 * 256 else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)], capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, "0\n"), found.stderr


@pytest.mark.parametrize("used", ["a context", "checkpoint"])
def test_an_engine_goes_with_its_last_owner(rig, used):  # noqa: F811
    import weakref

    import rig as rigs

    found = rigs.make(rig.kind)
    with found.saved():
        harness.loss_of(models.dense(found.device, checkpoint="none")).backward()
    if used == "checkpoint":
        # What single calls share is the engine's, and kept it for ever.
        x = torch.ones(64, device=found.device, requires_grad=True)
        lightering.torch.checkpoint(torch.sin, x, engine=found.engine).sum().backward()
    known = weakref.ref(found.desk), weakref.ref(found.engine)
    gc.disable()
    try:
        del found
        assert [each() for each in known] == [None, None], "no collection is needed"
    finally:
        gc.enable()


def test_workers_of_a_data_loader_do_no_harm(rig):  # noqa: F811
    found = run_script("""
        data = torch.utils.data.DataLoader(torch.arange(12.0).view(6, 2), num_workers=2)
        total = 0.0
        with SavedTensors(min_bytes=16, engine=engine):
            for batch in data:
                y = (x * batch.sum().item()).sin().sum()
                y.backward()
                total += batch.sum().item()
        print(total, Desk.of(engine).live_count)
    """, device=rig.device)
    assert (found.returncode, found.stdout) == (0, "66.0 0\n"), found.stderr


def test_an_engine_that_goes_lets_go_of_what_was_fetched_ahead(monkeypatch):
    """What nobody had read stayed its, and was another one's memory to all engines after it."""
    from lightering.torch import SavedTensors, _memory

    taken = []
    take = _memory.Room.take
    monkeypatch.setattr(_memory.Room, "take", lambda *args: taken.append(take(*args)) or taken[-1])

    def save_all(engine, tensors):
        with SavedTensors(min_bytes=16, engine=engine) as context:
            out = leaf("cpu")
            for tensor in tensors:
                out = save(out, [tensor], [])
        return out, context.report()

    engine = lightering.Engine("sim")
    out, _ = save_all(engine, [torch.randn(1024) for _ in range(4)])
    engine.drain()
    out.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(Planned):
        out.sum().backward()
    # After a backward that raised torch keeps its open tasks, and so the graph, until the next.
    leaf("cpu").sum().backward()
    del out, engine
    assert len(taken) == 4
    again = [torch.empty(0).set_(storage, 0, (1024,)) for storage, _ in taken]
    _, report = save_all(lightering.Engine("sim"), again)
    assert (report.moved, report.kept) == (4 * 4096, {})


def fail(*_):
    raise Planned
