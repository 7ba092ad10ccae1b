"""An argument that is no such thing: the fault guarded against is an error that names neither the
argument nor what is allowed, or none at all, and an engine that was made of it.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightering
import lightering.torch
import pytest
import torch
import torch.utils.checkpoint
from lightering.torch import HiddenStates, SavedTensors, checkpoint, offload_wrapper, report

ENGINE = lightering.Engine("sim", pinned_bytes="1MiB")
SIZE = (r"a size in bytes: an int of 0 or more, under 2 \*\* 64, or text such as "
        r"'512MiB' or '1.5GiB'".replace("'", chr(34)))
DEVICE = 'text: "auto", "sim", "sim:N", "cuda" or "cuda:N"'
FLAG = "True or False"
COUNT = "an int from 0 to 1048576"
LINEAR = torch.nn.Linear(2, 2)

NO_SIZES = (None, True, 1.5, [], b"1GiB", ENGINE)
BAD_SIZES = (-1, "x", "", "-1", "1.5XB", "9" * 40, 2**64)
NO_COUNTS = (None, True, 1.5, "2", ENGINE)
BAD_COUNTS = (-1, 2**20 + 1, 2**70)
NO_FLAGS = (None, 0, 1, "no", ENGINE)
NO_ENGINES = (0, "cuda:0", True, torch.device("cpu"), ENGINE._native)
NO_DEVICES = (None, 0, True, torch.float32, ENGINE)
BAD_DEVICES = ("", "gpu", "sim:", "sim:x", "cuda:-1", "cuda:99999999999", "CUDA",
               torch.device("cpu"))

Case = tuple[str, Callable[[Any], Any], tuple[Any, ...], tuple[Any, ...], str]


def sim(**options: Any) -> Any:
    return lightering.Engine("sim", **options)


def of_modes() -> Iterator[Case]:
    for mode in (HiddenStates, SavedTensors):
        name = mode.__name__
        yield f"{name}.min_bytes", lambda it, mode=mode: mode(min_bytes=it), \
            NO_SIZES[:-1], BAD_SIZES, SIZE
        yield f"{name}.placement", lambda it, mode=mode: mode(placement=it), \
            (None, 0, True), ("gpu", "", "CPU"), '"cpu" or "none"'
        yield f"{name}.engine", lambda it, mode=mode: mode(engine=it), \
            NO_ENGINES, (), "a lightering.Engine, or None"
    yield "HiddenStates.min_step_bytes", lambda it: HiddenStates(min_step_bytes=it), \
        NO_SIZES, BAD_SIZES, SIZE + '; or "auto"'
    yield "HiddenStates.keep_last", lambda it: HiddenStates(keep_last=it), \
        NO_COUNTS[:-1], BAD_COUNTS, COUNT


# What is called: callable and parameter, the call, wrong types, wrong values, what is allowed.
CASES: list[Case] = [
    ("Engine.device", lightering.Engine, NO_DEVICES, BAD_DEVICES, DEVICE),
    ("Engine.pinned_bytes", lambda it: sim(pinned_bytes=it), NO_SIZES, BAD_SIZES,
     SIZE + '; or "auto"'),
    ("Engine.pinned_bytes", lambda it: sim(pinned_bytes=it), (), (0, 4095, "4095B"),
     'a size of at least 4096 bytes; or "auto"'),
    ("Engine.unreleased_bytes", lambda it: sim(unreleased_bytes=it), (*NO_SIZES,), BAD_SIZES, SIZE),
    ("Engine.prefetch_bytes", lambda it: sim(prefetch_bytes=it), NO_SIZES, BAD_SIZES, SIZE),
    ("Engine.prefetch_count", lambda it: sim(prefetch_count=it), NO_COUNTS, BAD_COUNTS, COUNT),
    ("Engine.time_stalls", lambda it: sim(time_stalls=it), NO_FLAGS, (), FLAG),
    ("Engine.verify", lambda it: sim(verify=it), NO_FLAGS, (), FLAG),
    ("Engine.seed", lambda it: sim(seed=it), NO_COUNTS[1:], (-1, 2**64),
     "an int from 0 to 18446744073709551615"),
    ("Engine.seed", lambda it: lightering.Engine("cuda:0", seed=it), (), (1,),
     "an int for device=\"sim\" only; got device='cuda:0'"),
    ("Engine.of.device", lightering.Engine.of, NO_DEVICES, BAD_DEVICES, DEVICE),
    ("Engine.reserve.bytes", ENGINE.reserve, NO_SIZES, BAD_SIZES, SIZE),
    ("Engine.reserve.background", lambda it: ENGINE.reserve(0, background=it), NO_FLAGS, (), FLAG),
    *of_modes(),
    ("offload_wrapper.module", offload_wrapper, (None, 3, torch.nn.Linear, ENGINE), (),
     "a torch.nn.Module"),
    ("offload_wrapper.engine", lambda it: offload_wrapper(LINEAR, engine=it), NO_ENGINES, (),
     "a lightering.Engine, or None"),
    ("checkpoint.function", lambda it: checkpoint(it, torch.ones(1)), (None, 3, "sin", ENGINE), (),
     "something that can be called"),
    ("checkpoint.use_reentrant",
     lambda it: checkpoint(torch.sin, torch.ones(1), use_reentrant=it), NO_FLAGS, (), FLAG),
    ("checkpoint.engine", lambda it: checkpoint(torch.sin, torch.ones(1), engine=it), NO_ENGINES,
     (), "a lightering.Engine, or None"),
    ("report.engine", report, NO_ENGINES, (), "a lightering.Engine, or None"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_argument_that_is_not_allowed_is_named_with_its_value_and_what_is(case):
    name, call, types, values, allowed = case
    argument = name.rpartition(".")[2]
    for kind, wrong in ((TypeError, types), (ValueError, values)):
        for value in wrong:
            with pytest.raises(kind) as raised:
                call(value)
            text = str(raised.value)
            assert type(raised.value) is kind, raised.value
            assert text.startswith(f"{argument}={value!r}: "), text
            assert re.search(allowed if allowed.startswith("a size in") else re.escape(allowed),
                             text), text


@pytest.mark.parametrize("call", [SavedTensors, HiddenStates])
def test_an_engine_in_the_place_of_another_argument_is_told_its_name(call):
    parameters = inspect.signature(call).parameters.values()
    places = [each.name for each in parameters
              if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "engine"]
    for count, name in enumerate(places):
        rest = {"keep_last": 1, "min_bytes": 1, "placement": "cpu"}
        before = [rest[each] for each in places[:count]]
        with pytest.raises(TypeError, match=rf"{name}=<lightering.Engine on sim:0>: .*engine="):
            call(*before, ENGINE)


def public_parameters() -> Iterator[str]:
    """Every parameter of everything public, but what is passed on to others."""
    functions = {
        name: getattr(place, name)
        for place in (lightering, lightering.torch) for name in place.__all__
        if callable(getattr(place, name)) and name != "Report"
        and not (isinstance(getattr(place, name), type)
                 and issubclass(getattr(place, name), Exception))}
    methods = inspect.getmembers(lightering.Engine, inspect.isfunction)
    functions |= {f"Engine.{name}": each for name, each in methods if not name.startswith("_")}
    for name, function in functions.items():
        for parameter in inspect.signature(function).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.name != "self":
                yield f"{name}.{parameter.name}"


def test_every_argument_of_everything_public_is_among_the_cases():
    found = set(public_parameters())
    assert {"Engine.verify", "HiddenStates.keep_last", "checkpoint.function"} <= found
    assert found == {case[0] for case in CASES}


def test_what_is_allowed_at_the_edges_is_taken():
    least = lightering.Engine(
        "sim:0", pinned_bytes=" auto ", unreleased_bytes=0, prefetch_bytes="0B", prefetch_count=0,
        seed=2**64 - 1)
    assert least.device == "sim:0"
    assert lightering.Engine("sim", pinned_bytes=4096).stats()["pinned_engine_budget_bytes"] == 4096

    class Three:
        def __index__(self) -> int:
            return 3

    assert HiddenStates(keep_last=Three())._keep_last == 3
    assert SavedTensors(min_bytes=Three())._min_bytes == 3
    assert SavedTensors(0, "none", ENGINE) is not None


def test_whatever_names_a_device_gives_its_one_shared_engine():
    shared = lightering.Engine.of("sim")
    assert lightering.Engine.of("sim:0") is shared
    assert lightering.Engine.of("sim:1") is not shared
    if not torch.cuda.is_available():
        assert lightering.Engine.of("auto") is shared
    with pytest.raises(lightering.Unavailable):
        lightering.Engine.of("sim:99")
    if torch.cuda.is_available():
        assert lightering.Engine.of(torch.device("cuda")) is lightering.Engine.of("cuda:0")
    else:
        with pytest.raises(lightering.Unavailable):
            lightering.Engine(torch.device("cuda", 0))


DEFAULTS = {
    lightering.Engine: dict(
        device="cuda:0", pinned_bytes="auto", unreleased_bytes="512MiB", prefetch_bytes="512MiB",
        prefetch_count=8, time_stalls=False, verify=False, seed=None),
    HiddenStates: dict(
        keep_last=1, min_bytes=1024, placement="cpu", engine=None, min_step_bytes="auto"),
    SavedTensors: dict(min_bytes=1 << 20, placement="cpu", engine=None),
    offload_wrapper: dict(engine=None),
    checkpoint: dict(use_reentrant=False, engine=None),
    report: dict(engine=None),
}


@pytest.mark.parametrize("call", DEFAULTS, ids=lambda call: call.__name__)
def test_the_defaults_are_those_that_are_documented(call):
    found = {each.name: each.default for each in inspect.signature(call).parameters.values()
             if each.default is not each.empty}
    assert found == DEFAULTS[call]
    text = inspect.getdoc(call) or ""
    for name in [*found, "Raises"]:
        assert f"{name}:" in text, f"{call.__name__}: {name} is not in the docstring"
    if call not in (lightering.Engine, report):
        assert "Source:" in text, call.__name__


def test_the_default_windows_are_what_the_engine_works_with():
    """Half a gibibyte each; in HiddenStates less: twice the largest item, of which one is the
    item that stays as the last; and as before after."""
    engine = lightering.Engine("sim")
    windows = engine._native.windows
    assert windows() == (512 << 20, 512 << 20)
    for count, keep_last, unreleased in ((1000, 1, 1), (3000, 1, 1), (3000, 0, 2), (3000, 3, 1)):
        x = torch.ones(count, requires_grad=True) * 2
        with HiddenStates(keep_last, engine=engine):
            for _ in range(4):
                x = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
            assert windows() == (unreleased * 4 * count, 2 * 4 * count)
            x.sum().backward()
        assert windows() == (512 << 20, 512 << 20)
    own = lightering.Engine("sim", unreleased_bytes="1MiB")
    with HiddenStates(engine=own):
        x = torch.utils.checkpoint.checkpoint(
            torch.sin, x.detach().requires_grad_(), use_reentrant=False)
        assert own._native.windows() == (1 << 20, 512 << 20)
    x.sum().backward()


def test_windows_are_the_largest_that_one_of_two_contexts_asks_for():
    """They were the last one's for ever, where two threads did not leave in the other order."""
    engine = lightering.Engine("sim")
    windows, found = engine._native.windows, []
    turns = [threading.Event() for _ in range(3)]

    def train(count: int, mine: threading.Event, until: threading.Event) -> None:
        x = torch.ones(count, requires_grad=True) * 2
        with HiddenStates(engine=engine):
            out = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
            out.sum().backward()
            mine.set()
            until.wait(60)
        found.append(windows())

    first = threading.Thread(target=train, args=(3000, turns[0], turns[1]))
    second = threading.Thread(target=train, args=(1000, turns[1], turns[2]))
    first.start()
    assert turns[0].wait(60)
    second.start()
    first.join()
    turns[2].set()
    second.join()
    assert found == [(4 * 1000, 2 * 4 * 1000), (512 << 20,) * 2]


def test_an_engine_is_of_the_first_gpu_unless_something_else_is_asked_for():
    """Where there is none it is no simulated one, on which nothing of a training run would move."""
    if torch.cuda.is_available():
        assert repr(lightering.Engine()).endswith("cuda:0>")
        return
    with pytest.raises(lightering.Unavailable, match="cuda|CUDA|driver"):
        lightering.Engine()
