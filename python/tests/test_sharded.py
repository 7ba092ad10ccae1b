"""Offload breaks what FSDP2 gives (keys, shards, saved files, resumption): the fault guarded
against.

The scaffolding is tried on two ranks with torch's own offload_wrapper and without offload; the
modes of this package are plugged into the same functions.
"""

from __future__ import annotations

import pytest
import sharded
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks


def fails(rank, world):
    if rank == 1:
        raise ValueError("rank one is broken")
    # The others must not be left waiting in this.
    dist.all_reduce(torch.ones(1))


def dies(rank, world):
    import os

    if rank == 0:
        os._exit(9)
    dist.all_reduce(torch.ones(1))


def sums(rank, world, first):
    value = torch.full((2,), float(first + rank))
    dist.all_reduce(value)
    return value.tolist()


def test_ranks_give_their_results_in_order(tmp_path):
    assert run_ranks(sums, 2, tmp_path, 5) == [[11.0, 11.0]] * 2


@pytest.mark.parametrize("function, said", [
    (fails, "rank one is broken"), (dies, "rank 0 left no result, exit code 9"),
])
def test_a_rank_that_fails_fails_the_test_and_frees_the_others(tmp_path, function, said):
    with pytest.raises(RankFailed, match=said):
        run_ranks(function, 2, tmp_path)


def test_offload_of_torch_itself_passes_what_is_asked_of_a_mode(tmp_path):
    results = run_ranks(
        sharded.whole_check, 2, tmp_path, sharded.of_torch, sharded.plain, str(tmp_path))
    for found in results:
        before, after = found["keys"]
        assert before == after
        assert found["dense"] > 10 and found["moe"] > found["dense"]
        assert found["resumed"] == []
