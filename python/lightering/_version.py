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

import operator
from collections.abc import Sequence
from typing import Any

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


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version, of a subclass as well."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def edited(shared: torch.Tensor, seen: int, shape: torch.Size) -> RuntimeError:
    """What autograd raises where a tensor of this shape was edited in place after it was saved."""
    kind = f"a {shared.dtype} of shape {list(shape)} on {shared.device}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {kind} is at version {version_of(shared)}; expected version {seen} instead. "
        "It was saved for backward and moved off its device; edit a clone of it, or out of place"
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

    def __init__(self, tensor: torch.Tensor, shared: torch.Tensor | None = None) -> None:
        """Takes the version of now as the saved one.

        Args:
            tensor: has a counter.
            shared: a tensor that shares it, and keeps no bytes; made of a plain one without that.
        """
        self._shared = share(tensor) if shared is None else shared
        self._seen = version_of(self._shared)
        self._shape = tensor.shape

    def changed(self) -> bool:
        """Whether the tensor was edited in place since."""
        return version_of(self._shared) != self._seen

    def check(self) -> None:
        """Raises what autograd raises at this place.

        Raises:
            RuntimeError: the tensor was edited in place after it was saved.
        """
        if self.changed():
            raise edited(self._shared, self._seen, self._shape)

    def lend_outer(self, made: Any, names: Sequence[str]) -> Any:
        """``made``, of a subclass as ``share_outer`` has them, as a tensor whose edits count here,
        so that whoever reads the same graph later hears of them; itself where its class does not
        go along."""
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                lent: Any = self._shared.detach()
                # Sizes and strides; the counter is the tensor's own slot, and stays.
                lent.data = made.detach()
                getattr(lent, "__dict__", {}).update(getattr(made, "__dict__", {}))
                for name in names:
                    setattr(lent, name, getattr(made, name))
                lent.requires_grad_(made.requires_grad)
                is_same = bool(
                    lent.__tensor_flatten__() == made.__tensor_flatten__()
                    and (lent.size(), lent.stride()) == (made.size(), made.stride())
                    and lent._version == self._shared._version)
        except Exception:
            # As above.
            return made
        inner = ((getattr(lent, name), getattr(made, name)) for name in names)
        return lent if is_same and all(one is two for one, two in inner) else made


def share_outer(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor | None:
    """As ``share``, of a subclass whose attributes of these names hold its bytes; None where it
    does not let go of them. An operator in place counts in the subclass, not in what it holds."""
    inner: Any = [getattr(tensor, name) for name in names]
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            shared = tensor.detach()
            if shared is tensor:
                return None
            for name, part in zip(names, inner, strict=True):
                setattr(shared, name, _empty(part))
            # A class may have its own way to keep them, or a counter of its own.
            is_bare = not any(getattr(shared, name).numel() for name in names)
            is_same = is_bare and shared._version == tensor._version
    except Exception:
        # Whatever a foreign class says who is treated so; an inference tensor has no version.
        return None
    still = [getattr(tensor, name) for name in names]
    return shared if is_same and all(map(operator.is_, still, inner)) else None


def probe(tensor: torch.Tensor) -> VersionProbe | None:
    """A probe of a tensor; None for an inference tensor, which has no counter and has to stay."""
    return None if tensor.is_inference() else VersionProbe(tensor)
