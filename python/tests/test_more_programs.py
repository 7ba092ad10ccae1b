"""What programs around a training step do breaks the step: the fault guarded against.

Copies of models, averages of weights, generation and evaluation between steps, pipelines of many
micro-batches, optimisers that step inside of the backward, mixed precision.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import harness
import models
import pytest
import rig as rigs
import torch
from harness import Way, compare, loss_of
from lightering.torch import _reasons, _warn, offload_wrapper
from lightering.torch import report as report_of_wrappers
from rig import rig  # noqa: F401
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@pytest.fixture(autouse=True)
def warned_anew(monkeypatch):
    monkeypatch.setattr(_warn, "_told", set())


def wrapped(rig, model):  # noqa: F811
    for index, layer in enumerate(model.layers):
        model.layers[index] = offload_wrapper(checkpoint_wrapper(layer), engine=rig.engine)
    return model


def plain(model):
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model


def unchecked(rig):  # noqa: F811
    return models.dense(rig.device, checkpoint="none")


# ---- copies of models ----


def test_a_wrapped_model_can_be_copied_and_both_train(rig):  # noqa: F811
    model = wrapped(rig, unchecked(rig))
    again = copy.deepcopy(model)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(one is not two and torch.equal(one, two) for one, two in pairs)
    steps = [Way("first", prepare=lambda _: model), Way("copy", prepare=lambda _: again)]
    compare(lambda: unchecked(rig), harness.one_step, *steps, baseline=Way("plain", prepare=plain))
    assert report_of_wrappers(rig.engine).moved > 0


def test_weights_of_a_wrapped_model_can_be_averaged(rig):  # noqa: F811
    model = wrapped(rig, unchecked(rig))
    average = torch.optim.swa_utils.AveragedModel(model)
    loss_of(model).backward()
    average.update_parameters(model)
    assert torch.equal(next(average.module.parameters()), next(model.parameters()))


def test_a_whole_wrapped_model_can_be_saved_and_loaded():
    # Of the engine that contexts share: no other can be found again in another process.
    model = models.dense(checkpoint="none")
    for index, layer in enumerate(model.layers):
        model.layers[index] = offload_wrapper(checkpoint_wrapper(layer))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert list(again.state_dict()) == list(model.state_dict())
    loss_of(again).backward()


# ---- what is around a step ----


def test_generation_and_evaluation_between_steps_change_nothing(rig):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    call = GradientCheckpointingLayer.__call__
    words = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def train_and_generate(model, around):
        found = []
        for seed in range(2):
            with around():
                loss = loss_of(model, seed)
                loss.backward()
                model.eval()
                # In the middle of a context, with a cache of keys that grows in place.
                found.append(model.generate(models.batch(device=rig.device)["input_ids"], **words))
            found += [loss, model.generate(found[-1][:, :8], **words).float()]
            model.train()
        return [each.float() for each in found]

    hidden, saved = rig.hidden(), rig.saved()
    compare(lambda: models.qwen3(rig.device), train_and_generate,
            Way("hidden", lambda: hidden), Way("saved", lambda: saved))
    assert GradientCheckpointingLayer.__call__ is call, transformers.__version__


def test_a_pipeline_of_micro_batches_may_finish_in_any_order(rig):  # noqa: F811
    def pipeline(model, around):
        """One forward, one backward, five micro-batches under way, the middle one never done."""
        losses, open_ = [], []
        with around():
            for seed in range(9):
                open_.append(loss_of(model, seed, tokens=8 + 4 * (seed % 3)))
                if len(open_) == 5:
                    open_.pop(2)
                    loss = open_.pop(seed % 2)
                    loss.backward()
                    losses.append(loss)
            while open_:
                losses.append(open_.pop())
                losses[-1].backward()
        return losses

    for how in ("none", "positional", "keyword"):
        # As in test_gradients.py: torch does not keep a GPU's random state for keywords.
        drops = {"dropout": 0.0} if how == "keyword" and rig.kind == "cuda" else {}
        compare(lambda how=how, drops=drops: models.moe(rig.device, checkpoint=how, **drops),
                pipeline,
                Way("saved", rig.saved), Way("hidden", rig.hidden),
                Way("hidden, three stay", lambda: rig.hidden(keep_last=3)))


def test_an_optimiser_may_step_inside_of_the_backward(rig):  # noqa: F811
    def step(model, around):
        def update(weight):
            with torch.no_grad():
                weight.add_(weight.grad, alpha=-0.1)
            weight.grad = None

        handles = [weight.register_post_accumulate_grad_hook(update)
                   for weight in model.parameters()]
        losses = []
        for seed in range(3):
            with around():
                loss = loss_of(model, seed)
                loss.backward()
            losses.append(loss)
        for handle in handles:
            handle.remove()
        loss_of(model).backward()
        return losses

    for how in ("none", "positional"):
        compare(lambda how=how: models.dense(rig.device, checkpoint=how), step,
                Way("saved", rig.saved), Way("hidden", rig.hidden))


@pytest.mark.parametrize("how", ["none", "positional", "keyword", "reentrant"])
def test_mixed_precision_by_autocast_has_the_same_bits(rig, how):  # noqa: F811
    def step(model, around):
        losses = []
        for seed in range(2):
            with around(), torch.autocast(rig.device.split(":")[0], torch.bfloat16):
                losses.append(loss_of(model, seed))
            (losses[-1] * 1024).backward()
        return losses

    compare(lambda: models.dense(rig.device, checkpoint=how), step,
            Way("saved", rig.saved), Way("hidden", rig.hidden))


def test_a_place_where_torch_refuses_hooks_is_left_as_it_was_found(rig):  # noqa: F811
    model = models.dense(rig.device)
    for context in (rig.saved(), rig.hidden()):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"), \
                pytest.raises(RuntimeError, match="not here"), context:
            raise AssertionError("entered")
        assert not torch.nn.modules.module._global_forward_pre_hooks
        with context:
            loss_of(model).backward()
        assert context.report().moved > 0


# ---- what a mode says ----


def test_a_mode_of_layer_inputs_around_a_model_that_checkpoints_nothing_says_so(rig):  # noqa: F811
    model, context = unchecked(rig), rig.hidden()
    with pytest.warns(UserWarning, match="checkpoint"), context:
        loss_of(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with context:
            loss_of(model).backward()
    # Neither an evaluation is a mistake, nor a context around a backward alone, whose recompute
    # saves tensors.
    _warn._told.clear()
    checkpointed = models.dense(rig.device, checkpoint="reentrant")
    with context:
        loss = loss_of(checkpointed)
    with warnings.catch_warnings(), context:
        warnings.simplefilter("error")
        loss.backward()
    with warnings.catch_warnings(), torch.no_grad(), context:
        warnings.simplefilter("error")
        loss_of(model)


def test_a_small_view_does_not_keep_a_large_storage_on_the_device(rig):  # noqa: F811
    leaf = torch.ones(4, device=rig.device, requires_grad=True)
    context = rig.saved(min_bytes=4096)
    with context:
        large = leaf.repeat(4096)
        # Saved whole, and a view of 16 bytes of it.
        loss = large.sin().sum() + large[:4].cos().sum()
        del large
    loss.backward()
    report = context.report()
    assert report.moved == 4 * 4 * 4096
    assert "too small" not in report.kept, report
    del loss


def test_what_outlives_its_graph_moves_once_and_not_in_every_step(rig):  # noqa: F811
    # A data set on the device, of which each step takes a batch.
    data = torch.ones(64, 64, device=rig.device)
    weight = torch.ones(64, 64, device=rig.device, requires_grad=True)
    context = rig.saved()
    moved, kept = [], []
    for step in range(3):
        with context:
            loss = (data[step : step + 2] @ weight).sum()
        loss.backward()
        del loss
        rig.engine.drain()
        rig.desk.sweep()
        moved.append(context.report().moved)
        kept.append(context.report().kept)
    assert moved == [4 * 64 * 64, 0, 0]
    assert kept[1] == kept[2] == {"outlived its graph before": 2 * 64 * 4}


def test_a_buffer_that_stayed_and_outlived_its_graph_is_not_said_to_have_left(rig):  # noqa: F811
    """The reason said that its storage left once, of one that had never been copied."""
    buffer = torch.ones(64, 64, device=rig.device, requires_grad=True)
    kept = []
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with rig.hidden() as context:
                torch.utils.checkpoint.checkpoint(
                    torch.sin, buffer, use_reentrant=False).sum().backward()
        kept.append(context.report().kept)
    outlived = {_reasons.OUTLIVED: 4 * 64 * 64}
    assert kept == [{_reasons.AMONG_THE_LAST: 4 * 64 * 64}, outlived, outlived]
    assert rig.engine.stats()["evicted_count"] == 0
    assert _reasons.REASONS[_reasons.OUTLIVED].startswith("its storage was saved before")


def test_a_storage_is_saved_again_before_its_dead_stash_is_buried(rig):  # noqa: F811
    leaf = torch.ones(64, device=rig.device, requires_grad=True)
    wanted = 2 * torch.cos(torch.full((64,), 2.0, device=rig.device))
    context = rig.saved()
    for _ in range(3):
        value = leaf * 2
        with context:
            graphs = [value.sin().sum()]
        with rig.desk.lock:
            thread = threading.Thread(target=graphs.clear)
            thread.start()
            thread.join()
            with context:
                loss = value.sin().sum()
        loss.backward()
        assert torch.equal(leaf.grad, wanted)
        leaf.grad = None
        del loss, value


def test_a_module_with_an_engine_of_its_own_says_that_it_cannot_be_pickled(rig):  # noqa: F811
    model = wrapped(rig, unchecked(rig))
    with pytest.raises(pickle.PicklingError, match="engine="):
        torch.save(model, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


def test_a_tiny_storage_that_is_expanded_is_small(rig):  # noqa: F811
    leaf = torch.ones(1, device=rig.device, requires_grad=True)
    context = rig.saved(min_bytes=4096)
    with context:
        loss = (leaf * 2).expand(4096).sin().sum()
    loss.backward()
    assert context.report().moved == 0
    del loss


# ---- threads ----


def test_a_graph_can_be_dropped_while_another_thread_holds_the_engine(rig):  # noqa: F811
    # A collector that runs while one engine is held drops graphs of another: two threads that do
    # so would wait for each other for ever.
    context = rig.saved()
    graphs = []
    with context:
        graphs.append(loss_of(unchecked(rig)))
    dropped = threading.Event()

    def drop():
        graphs.clear()
        dropped.set()

    with rig.desk.lock:
        thread = threading.Thread(target=drop)
        thread.start()
        assert dropped.wait(30), "dropping a graph waited for the engine"
    thread.join()
    rig.assert_nothing_left()


def test_two_threads_train_two_models_with_one_engine(rig):  # noqa: F811
    hows = ("none", "positional")
    wanted = {how: compare(lambda how=how: models.moe(rig.device, checkpoint=how), plain_steps)
              for how in hows}
    # Made here: threads share one generator of random numbers.
    trained = {how: models.moe(rig.device, checkpoint=how) for how in hows}
    contexts = {"none": rig.saved(), "positional": rig.hidden()}
    found = in_threads(trained, contexts)
    for how in hows:
        assert not harness.differences(wanted[how], found[how])


def in_threads(trained, contexts):
    """Trains each model in a thread of its own; their outcomes."""
    found, faults = {}, []

    def train(name):
        try:
            losses = plain_steps(trained[name], lambda: contexts[name])
            found[name] = harness.Outcome(
                [loss.detach() for loss in losses],
                {name: weight.grad for name, weight in trained[name].named_parameters()})
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=train, args=(name,)) for name in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    return found


def plain_steps(model, around):
    """Steps without dropout: threads share one generator of random numbers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    losses = []
    for seed in range(4):
        with around():
            loss = loss_of(model, seed)
            loss.backward()
        losses.append(loss)
    return losses


def test_an_engine_per_thread_under_orders_that_change():
    seeded = [rigs.make("sim", seed=seed, unreleased_bytes="1KiB", prefetch_bytes="2KiB")
              for seed in range(2)]
    wanted = compare(lambda: models.moe(checkpoint="none"), plain_steps)
    trained = {index: models.moe(checkpoint="none") for index in range(2)}
    found = in_threads(trained, {index: seeded[index].saved() for index in range(2)})
    for index in range(2):
        assert not harness.differences(wanted, found[index])
        seeded[index].assert_nothing_left()
