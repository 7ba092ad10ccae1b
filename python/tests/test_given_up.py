"""A checkpoint that an exception left, whose hooks torch keeps on for as long as the exception
lives, and takes off as whatever is uppermost then: the fault guarded against. Ours were.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

import lightering
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from lightering.torch import _wrapper, checkpoint, offload_wrapper
from lightering.torch._saved import _watch
from rig import MODES, rig  # noqa: F401
from test_interrupts import Interrupt, each, nothing_is_on
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

TORCH = (torch_checkpoint.__file__, torch.autograd.graph.__file__)


class Planned(Exception):
    pass


def fail(x):
    x.sin().exp()
    raise Planned


def again(x, function=fail, **options):
    """torch's own checkpoint."""
    return torch_checkpoint.checkpoint(function, x, use_reentrant=False, **options)


def x_of(rig):  # noqa: F811
    return torch.ones(8, 64, device=rig.device, requires_grad=True) * 1


def hooks():
    """All that are on, the uppermost first."""
    found, binding = [], torch._C._autograd
    while (top := binding._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        binding._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        binding._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in found]


def raised_in(context, body):
    """What a body raises that runs in a context, alive, with all that its traceback has."""
    with pytest.raises(Planned) as info, context:
        body()
    return info.value


def assert_moves_nothing_now(rig):  # noqa: F811
    """Neither a tensor that is nobody's, nor a buffer."""
    before = rig.moved()
    module = torch.nn.BatchNorm1d(256).to(rig.device).eval()
    out = module(torch.ones(8, 256, device=rig.device, requires_grad=True) * 1).sin().sum()
    for _ in range(3):
        out = again(out * 1, torch.sin)
    assert rig.moved() == before
    assert not _watch.users
    out.backward()


@pytest.fixture(autouse=True)
def _nothing_on_for_the_next_one():
    yield
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.mark.parametrize("mode", MODES)
def test_a_retry_that_keeps_what_was_raised_goes_on_for_ever(rig, mode):  # noqa: F811
    """The exception died inside of the next attempt, with the hooks of that one, which ended in
    `Usage: left before what was entered after it` of a program that uses `with`."""
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4)).to(rig.device)
    context, is_full = getattr(rig, mode)(), False

    def layer(index, h):
        if is_full and index == 2:
            raise torch.OutOfMemoryError("out of memory in a layer")
        return layers[index](h).sin()

    def attempt(count):
        nonlocal is_full
        problem = None
        for size in (count, count // 2):
            try:
                with context:
                    h = torch.ones(size, 64, device=rig.device, requires_grad=True) * 1
                    for index in range(4):
                        h = torch_checkpoint.checkpoint(layer, index, h, use_reentrant=False)
                    loss = h.square().mean()
                loss.backward()
                return layers[0].weight.grad.clone()
            except torch.OutOfMemoryError as error:
                problem, is_full = error, False
        raise problem

    wanted = attempt(4)
    for step in range(200):
        layers.zero_grad()
        is_full = step % 20 == 10
        assert torch.equal(attempt(8 if is_full else 4), wanted), step
    assert nothing_is_on()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_moves_outside_while_an_exception_lives(rig, mode):  # noqa: F811
    """Everything that was saved from then on left, and buffers with it."""
    context = getattr(rig, mode)()
    error = raised_in(context, lambda: again(x_of(rig)))
    assert nothing_is_on()
    assert_moves_nothing_now(rig)
    with context:
        before = hooks()
        del error
        gc.collect()
        assert hooks() == before


@pytest.mark.parametrize("how", ["checkpoint", "wrapper", "around"])
def test_a_call_of_its_own_leaves_nothing_on_either(rig, how):  # noqa: F811
    """The hooks of a wrapped module, or of one call, stayed on for as long as the exception."""
    class Failing(torch.nn.Module):
        def forward(self, h):
            return fail(h)

    module = checkpoint_wrapper(Failing())
    error = raised_in(contextlib.nullcontext(), {
        "checkpoint": lambda: checkpoint(fail, x_of(rig), engine=rig.engine),
        "wrapper": lambda: offload_wrapper(module, engine=rig.engine)(x_of(rig)),
        "around": lambda: checkpoint(module, x_of(rig), engine=rig.engine),
    }[how])
    assert nothing_is_on() and error.__traceback__
    assert_moves_nothing_now(rig)


def kept_inside(x):
    try:
        again(x)
    except Planned as error:
        return error


def chained(x):
    try:
        again(x)
    except Planned:
        # From inside of another one, in which it is dealt with.
        again(x, lambda h: (again(h, torch.sin), fail(h)))


def cut(x):
    try:
        again(x)
    except Planned as error:
        kept.append(error.__traceback__)
        raise error.with_traceback(None) from None


kept: list[object] = []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [kept_inside, chained, cut], ids=lambda body: body.__name__)
def test_whoever_has_the_traceback_the_hooks_go(rig, mode, body):  # noqa: F811
    """It is kept inside of a `with` that is left as it should be, or by an exception that was
    raised while it was dealt with, or by whoever cut it off."""
    context, held = getattr(rig, mode)(), []
    with contextlib.suppress(Planned):
        try:
            with context:
                held.append(body(x_of(rig)))
        except Planned as error:
            held.append(error)
            raise
    assert nothing_is_on() and held
    kept.clear()
    del held
    gc.collect()
    assert nothing_is_on()


def test_checkpoints_are_closed_from_the_inside_out(rig):  # noqa: F811
    """The context of an outer one ended before that of the one inside."""
    order = []

    @contextlib.contextmanager
    def noting(name):
        try:
            yield
        finally:
            order.append(name)

    def around(name, inner):
        return lambda h: again(
            h, inner, context_fn=lambda: (noting(name), contextlib.nullcontext()))

    error = raised_in(rig.saved(), lambda: around("outer", around("inner", fail))(x_of(rig)))
    assert order == ["inner", "outer"] and nothing_is_on() and error


def test_a_context_of_a_checkpoint_that_raises_is_not_what_is_told(rig, monkeypatch):  # noqa: F811
    told = []
    monkeypatch.setattr("sys.unraisablehook", told.append)

    @contextlib.contextmanager
    def raising():
        try:
            yield
        finally:
            raise ValueError("in the context of a checkpoint")

    context_fn = lambda: (raising(), contextlib.nullcontext())  # noqa: E731
    error = raised_in(rig.hidden(), lambda: again(x_of(rig), context_fn=context_fn))
    assert [type(each.exc_value) for each in told] == [ValueError]
    told.clear()
    assert nothing_is_on() and error


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_hooks_of_somebody_else_stay_in_their_order(rig, is_nested):  # noqa: F811
    """Those went that were uppermost, whose they were."""
    theirs = [saved_tensors_hooks(lambda x: x, lambda x: x) for _ in range(4)]

    def body():
        for one in theirs[1:3]:
            one.__enter__()
        with rig.hidden() if is_nested else contextlib.nullcontext():
            theirs[3].__enter__()
            # A checkpoint may have hooks as its context: those are its own.
            again(x_of(rig), context_fn=lambda: (save_on_cpu(), contextlib.nullcontext()))

    with theirs[0]:
        error = raised_in(rig.saved(), body)
        assert hooks() == [one.pack_hook for one in reversed(theirs)]
        del error
        gc.collect()
        assert hooks() == [one.pack_hook for one in reversed(theirs)]
        for one in theirs[1:]:
            one.__exit__()
    assert nothing_is_on()


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_that_runs_is_left_alone(rig, mode):  # noqa: F811
    """Who leaves a context inside of one that was begun in it is told, and has its gradient."""
    context, calls = getattr(rig, mode)(), []
    x = torch.ones(8, 64, device=rig.device, requires_grad=True)

    def leaving(h):
        out = h.sin()
        if not calls:
            calls.append(hooks())
            with pytest.raises(lightering.Usage, match="left before what was entered after it"):
                context.__exit__(None, None, None)
            assert hooks() == calls[0][:1]
            with pytest.raises(Planned), context:
                again(h)
            assert hooks() == calls[0][:1]
        return out.exp()

    context.__enter__()
    again(x * 1, leaving).sum().backward()
    assert nothing_is_on()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_the_exception_of_another_thread_closes_nothing_here(rig):  # noqa: F811
    """What is on in a thread is that one's: the outer context lost its hooks."""
    errors = []

    def other():
        try:
            again(x_of(rig))
        except Planned as error:
            errors.append(error)
        # Until the end of the thread they are on there, as torch has it.
        assert len(hooks()) == 1
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def body():
        raise errors[0]

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with rig.saved():
        before = hooks()
        raised_in(rig.saved(), body)
        raised_in(rig.saved(), lambda: (kept_inside(x_of(rig)), body()))
        assert hooks() == before
    # torch takes off what is uppermost where its generator dies, not where that was on.
    torch._C._autograd._push_saved_tensors_default_hooks(fail, fail)
    traces = [errors[0].__traceback__]
    while traces[-1].tb_next is not None:
        traces.append(traces[-1].tb_next)
    frames = [trace.tb_frame.f_locals for trace in traces]
    (generator,) = [each["gen"] for each in frames if "gen" in each]
    assert generator.gi_frame is not None
    generator.close()
    assert nothing_is_on()


@pytest.mark.parametrize("mode", [*MODES, "checkpoint"])
def test_an_interrupt_right_behind_the_push_of_torch_leaves_nothing_on(
    rig, mode, monkeypatch  # noqa: F811
):
    """Ours stayed on for good, as torch's were taken off in their place."""
    push = saved_tensors_hooks.__enter__

    def interrupted(self):
        push(self)
        monkeypatch.undo()
        raise KeyboardInterrupt

    x = x_of(rig)
    monkeypatch.setattr(saved_tensors_hooks, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if mode == "checkpoint":
            checkpoint(torch.sin, x, engine=rig.engine)
        else:
            with getattr(rig, mode)():
                again(x, torch.sin)
    assert nothing_is_on()
    assert_moves_nothing_now(rig)


class InTorch(Interrupt):
    def _call(self, frame, *_):
        return self._line if frame.f_code.co_filename in TORCH else None


@pytest.mark.parametrize("mode", [*MODES, "checkpoint"])
@pytest.mark.parametrize("function", [torch.sin, fail], ids=["sin", "fail"])
def test_an_interrupt_at_any_step_of_a_checkpoint_leaves_nothing_on(
    rig, mode, function  # noqa: F811
):
    """Those of its context, while a given-up one is closed, too."""
    context = None if mode == "checkpoint" else getattr(rig, mode)()

    def body(count):
        x, held = x_of(rig), []
        with InTorch(count) as interrupt:
            try:
                if context is None:
                    checkpoint(function, x, engine=rig.engine)
                else:
                    with context:
                        again(x, function)
            except Planned as error:
                held.append(error)
        assert nothing_is_on(), count
        return interrupt.came

    assert each(body) > 20


def test_a_call_has_its_hooks_on_without_a_step_of_python(rig):  # noqa: F811
    """An interrupt right behind torch's own push left them on for good."""
    calls, around = [], _wrapper._mode_of(rig.engine).hooks()
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    with around:
        pass
    sys.setprofile(None)
    assert not calls and nothing_is_on()
