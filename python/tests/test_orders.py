"""An order of readers that is not the one learned, and something that grows a little each step: the
faults guarded against. A wrong guess costs time, never a bit and never a byte.
"""

from __future__ import annotations

import harness
import models
import torch
from harness import compare
from rig import rig  # noqa: F401
from saving import leaf, save
from test_gradients import ways


class Skipping(models.Decoder):
    """A decoder whose layers can be left out for a step."""

    def skip(self, index):
        layers = list(self.layers)
        self.layers = torch.nn.ModuleList(layers[:index] + layers[index + 1:])
        return layers

    def restore(self, layers):
        self.layers = torch.nn.ModuleList(layers)


def skipping(device, how):
    return models.seeded(
        lambda: Skipping(models.Shape(layers=4, checkpoint=how)), device)


def changing_steps(model, around):
    """Lengths, layers and evaluations change between the steps."""
    losses = []
    for seed, tokens in enumerate((16, 16, 24, 8, 16, 32, 16)):
        layers = model.skip(seed % 4) if seed in (2, 5) else None
        with around():
            losses.append(harness.loss_of(model, seed, tokens=tokens))
            losses[-1].backward()
        if layers is not None:
            model.restore(layers)
        if seed % 3 == 1:
            model.eval()
            with torch.no_grad(), around():
                losses.append(harness.loss_of(model, 50 + seed, tokens=12))
            model.train()
    return losses


def test_lengths_and_layers_that_change_cost_no_bit(rig):  # noqa: F811
    for how in ("none", "positional"):
        compare(lambda how=how: skipping(rig.device, how), changing_steps,
                *ways(rig, how))


def test_a_backward_in_another_order_than_the_learned_one(rig):  # noqa: F811
    def run(order, around):
        x = leaf(rig.device)
        generator = torch.Generator().manual_seed(5)
        made = [torch.randn(512, generator=generator) for _ in range(6)]
        seen = {}
        with around:
            outs = [save(x, [one.to(rig.device)], seen.setdefault(index, []))
                    for index, one in enumerate(made)]
            for index in order:
                outs[index].sum().backward()
        assert all(torch.equal(seen[index][0][0].cpu(), made[index]) for index in order)
        assert around.report().moved == 6 * 2048

    for order in ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2], [5, 1], [2, 4, 0]):
        for _ in range(3):
            run(order, rig.saved())


def test_an_order_that_was_seen_once_is_fetched_ahead(rig):  # noqa: F811
    model = models.dense(rig.device, checkpoint="none", layers=6)
    misses, hits = [], []
    for _ in range(4):
        before = rig.engine.stats()
        with rig.saved():
            loss = harness.loss_of(model)
        # What is still leaving when its reader's turn is near is not fetched ahead.
        rig.engine.drain()
        rig.desk.flush()
        loss.backward()
        rig.engine.drain()
        after = rig.engine.stats()
        misses.append(after["miss_count"] - before["miss_count"])
        hits.append(after["hit_count"] - before["hit_count"])
    # Whoever reads first finds nothing ahead.
    few = all(20 * late <= early for late, early in zip(misses[1:], hits[1:], strict=True))
    assert few and min(hits[1:]) > 50, (misses, hits)


def test_nothing_grows_over_two_hundred_changing_steps(rig):  # noqa: F811
    model = models.dense(rig.device, checkpoint="positional")
    modes = [rig.saved(), rig.hidden()]
    pinned = []
    for step in range(200):
        with modes[step % 2]:
            loss = harness.loss_of(model, step, tokens=(8, 16, 24)[step % 3])
            if step % 7 == 3:
                del loss  # A forward whose backward never runs.
                continue
            loss.backward()
            del loss
        model.zero_grad(set_to_none=True)
        if step % 40 == 39:
            rig.engine.drain()
            rig.desk.sweep()
            stats = rig.engine.stats()
            pinned.append(stats["pinned_bytes"])
            assert (rig.desk.live_count, rig.desk.held_bytes) == (0, 0)
            assert stats["storage_count"] == 0
            assert not rig.desk._early and not rig.desk._retired
            assert len(rig.desk._by_storage) == 0 and len(rig.desk._finished) <= 8
    # Of each step the inputs of all layers but the last, or all that is saved.
    assert rig.moved() > 200 * 10_000
    assert len(set(pinned)) == 1, f"pinned bytes over the steps: {pinned}"


class Eager:
    """What a context packs with, where a stash dies, and everything is done, while it packs."""

    def __init__(self, saved, rig):  # noqa: F811
        self.saved, self.rig, self.was_early = saved, rig, False

    def __getattr__(self, name):
        return getattr(self.saved, name)

    def pack(self, *args):
        packed = self.saved.pack(*args)
        self.rig.engine.drain()
        # As another stash's death may, in this thread, which has the lock.
        self.rig.desk.flush()
        self.was_early |= packed[1] in self.rig.desk._early
        return packed


def test_a_storage_that_is_named_before_its_number_is_known_goes_all_the_same(rig):  # noqa: F811
    context = rig.saved()
    (device, (desk, saved)), = context._modes.items()
    eager = Eager(saved, rig)
    context._modes[device] = (desk, eager)
    seen, bits = [], torch.arange(256.0, device=rig.device)
    with context:
        saving_out = save(leaf(rig.device), [bits.clone()], seen)
        saving_out = save(saving_out, [torch.ones(256, device=rig.device)], [])
        assert eager.was_early and not desk._early
        assert not desk._held, "named, and still held"
        assert context.report().released == context.report().moved == 2 * 1024
        saving_out.sum().backward()
    assert torch.equal(seen[0][0], bits)
