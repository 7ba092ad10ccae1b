"""In-place edits of a tensor after autograd saved it, noticed without keeping its bytes.

What it is: a zero-byte tensor that shares the version counter of the saved one, and the check that
autograd makes itself where no saved-tensors hooks are.
What it is not: a checksum. Edits through ``.data`` or a raw pointer count for neither.
Invariant: ``check`` raises exactly where autograd, without hooks, would have raised; the probe
holds no bytes, so the storage dies when its owners go.

    saved tensor --+
    its views    --+-- version counter -- probe (no bytes), and the version when saved
    its base     --+

Who may call it: the adapters of lightering.torch, at pack and at unpack, and tests.
"""

from __future__ import annotations

import torch

_EMPTY: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


def _empty(like: torch.Tensor) -> torch.Tensor:
    """A tensor of no bytes to take the place of another one's bytes, one for each kind."""
    kind = (like.device, like.dtype)
    found = _EMPTY.get(kind)
    if found is None:
        # Outside inference mode, whose tensors have no counter and lend none.
        with torch.inference_mode(False):
            found = _EMPTY[kind] = torch.empty(0, device=like.device, dtype=like.dtype)
    return found


def share(
    tensor: torch.Tensor, empties: dict[torch.dtype, torch.Tensor] | None = None
) -> torch.Tensor:
    """A tensor of no bytes that shares the version counter of a plain one, which has one.

    Args:
        tensor: the plain one.
        empties: tensors of no bytes of its device by type, which are added to.
    """
    shared = tensor.detach()
    empty = None if empties is None else empties.get(tensor.dtype)
    if empty is None:
        empty = _empty(tensor)
        if empties is not None:
            empties[tensor.dtype] = empty
    # Takes the bytes away and leaves the counter, which is the detached tensor's own slot.
    shared.data = empty
    return shared


def edited(shared: torch.Tensor, seen: int, shape: torch.Size) -> RuntimeError:
    """What autograd raises where a tensor of this shape was edited in place after it was saved."""
    kind = f"a {shared.dtype} of shape {list(shape)} on {shared.device}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {kind} is at version {shared._version}; expected version {seen} instead. It "
        "was saved for backward and moved off its device; edit a clone of it, or out of place"
    )


def edited_here(tensor: torch.Tensor, seen: int) -> RuntimeError:
    """As ``edited``, of a tensor that stayed on its device."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device} is at "
        f"version {tensor._version}; expected version {seen} instead"
    )


class VersionProbe:
    """Follows the in-place edits of one tensor, its views and its base."""

    __slots__ = ("_seen", "_shape", "_shared")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Takes the version of now as the saved one. ``tensor`` is a plain one with a counter."""
        self._shared = share(tensor)
        self._seen = self._shared._version
        self._shape = tensor.shape

    def changed(self) -> bool:
        """Whether the tensor was edited in place since."""
        return self._shared._version != self._seen

    def check(self) -> None:
        """Raises what autograd raises at this place.

        Raises:
            RuntimeError: the tensor was edited in place after it was saved.
        """
        if self.changed():
            raise edited(self._shared, self._seen, self._shape)


def probe(tensor: torch.Tensor) -> VersionProbe | None:
    """A probe of a tensor; None for an inference tensor, which has no counter and has to stay."""
    return None if tensor.is_inference() else VersionProbe(tensor)
