"""Why a tensor stays on its device: every reason that a report can give.

What it is: the reasons as the keys of ``Report.kept``, each with what it means and what to do.
What it is not: a policy; contexts and the engine decide.
Invariant: a report's ``kept`` has these keys and no others, but for the text after ``refused: ``;
python/README.md lists the same ones.

    counts.stay(nbytes, TOO_SMALL)        engine: Kept::TooSmall --> "too small"

Who may call it: the contexts of lightering.torch, and tests.
"""

from __future__ import annotations

TOO_SMALL = "too small"
AMONG_THE_LAST = "among the last"
TOO_LITTLE = "too little in a step"
NO_PINNED_ROOM = "no pinned room"
LANE_FULL = "lane full"
OTHER_DEVICE = "other device"
EDITED = "edited since it was saved"
OUTLIVED = "outlived its graph before"
IN_BACKWARD = "saved in a backward pass"
OVERLAPS = "shares memory with another"
UNKNOWN_KIND = "unknown kind of tensor"
INFERENCE = "inference tensor"
LAZY = "lazy conjugate"
CAPTURE = "stream capture"
GRAPH_TREES = "CUDA graph trees"
WEIGHTS_UNKNOWN = "weights are unknown"
REFUSED = "refused"

REASONS: dict[str, str] = {
    TOO_SMALL: "fewer bytes than `min_bytes`",
    AMONG_THE_LAST: "one of the last `keep_last`, which the backward pass wants at once",
    TOO_LITTLE: "the inputs of the step before had fewer bytes in all than `min_step_bytes`: "
    "moving them takes the host longer than what they free is worth",
    NO_PINNED_ROOM: "no page-locked memory is free for it: raise `pinned_bytes`, the bound of its "
    "engine, or `reserve` more where the pool has none",
    LANE_FULL: "too many copies out are under way; the next tensors go again",
    OTHER_DEVICE: "not of a device of this context: a CPU tensor, which only an engine of the "
    "simulated device moves (`Engine(\"sim\")`), or one of another GPU than `engine=` serves",
    EDITED: "an earlier version of its storage is saved already, and may be on its way",
    OUTLIVED: "its storage was saved before, and its owner kept it after the graph was gone, as a "
    "data set, a cache or a weight that is no parameter: moving it would free nothing",
    IN_BACKWARD: "a recompute or a double backward saved it, and its reader comes next",
    OVERLAPS: "another storage over the same bytes has left, such as one of two made by DLPack",
    UNKNOWN_KIND: "a subclass that does not say of which tensors it is, a sparse, a quantized "
    "or a nested one, or one inside of `vmap`",
    INFERENCE: "made in inference mode, and so without a version that would tell of edits",
    LAZY: "a conjugate or a negative that is not computed yet",
    CAPTURE: "a CUDA graph is being captured, whose replays use its address",
    GRAPH_TREES: "`torch.compile` replays CUDA graphs in this thread (`reduce-overhead`), and a "
    "replay writes over what it saved",
    WEIGHTS_UNKNOWN: "this torch does not show which weights FSDP2 gathered; those must not move",
    REFUSED: "by the engine, with its own words after a colon: `refused: out of device memory`",
}
"""Every reason, and what it means."""
