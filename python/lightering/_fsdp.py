"""Storages that never leave the device: parameters, buffers, weights that FSDP2 gathered.

What it is: the set of such storages, read anew at each forward of a root module.
What it is not: a list of addresses. Autograd saves plain views of gathered weights, whose data
pointer matches no parameter, and FSDP empties those storages itself after the forward.
Invariant: while a module that was called inside the watch is in its forward, every storage of its
parameters, of its buffers, and of its gathered weights is in the set. Where a module's gathered
weights cannot be read, everything is, and ``blind`` says why.

    first call of a module (root) --> read all its modules; watch nothing until it returns
       an FSDP module's forward   --> after FSDP gathered: read that module's weights again
    the root returns or raises    --> watch for the next root

Who may call it: the adapters of lightering.torch, and tests.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ._native import is_weight as is_weight
from ._ownership import identity
from ._subclass import flatten, is_plain


class ResidentStorages:
    """The storages that never leave, of all root modules called between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.blind = ""
        """Why everything counts as resident; empty where the set is known."""
        self._known: set[weakref.ref[torch.UntypedStorage]] = set()
        self._hooked: weakref.WeakKeyDictionary[torch.nn.Module, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )
        self._roots: RemovableHandle | None = None
        self._return: RemovableHandle | None = None
        self._thread = 0

    def __contains__(self, tensor: object) -> bool:
        """Whether the storage of a tensor, or of one that a subclass is of, has to stay."""
        if self.blind:
            return True
        if not isinstance(tensor, torch.Tensor):
            return False
        if is_plain(tensor):
            return self.has(tensor.untyped_storage())
        # Such as a sparse one, which has no storage: it is no parameter's.
        flat = flatten(tensor)
        return flat is not None and any(identity(leaf) in self._known for leaf in flat.leaves)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this storage has to stay, where the set is known."""
        return weakref.ref(storage) in self._known

    def __len__(self) -> int:
        """How many living storages are known."""
        return sum(known() is not None for known in self._known)

    def start(self) -> None:
        """Watches for calls of root modules in this thread. Idempotent."""
        self._thread = threading.get_ident()
        self._watch()

    def stop(self) -> None:
        """Takes all hooks back and forgets what is dead. Idempotent."""
        for handle in (self._roots, self._return, *self._hooked.values()):
            if handle is not None:
                handle.remove()
        self._roots = self._return = None
        self._hooked.clear()
        self._forget_the_dead()

    def read(self, root: torch.nn.Module) -> None:
        """Reads a module and all its modules: parameters, buffers, and what FSDP gathered."""
        self._forget_the_dead()
        for module in root.modules():
            if module._parameters:
                self._add(each for each in module._parameters.values() if each is not None)
            if module._buffers:
                self._add(each for each in module._buffers.values() if each is not None)
            if is_fsdp(module):
                self._read_gathered(module)
                if module not in self._hooked:
                    # FSDP's own hook stands before this one, so the weights are gathered by now.
                    handle = module.register_forward_pre_hook(self._fsdp_forward)
                    self._hooked[module] = handle

    def _watch(self) -> None:
        if self._roots is None:
            self._roots = register_module_forward_pre_hook(self._root_forward)

    def _root_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        # While the root runs there is no global hook: they slow every call of every module, and
        # break graphs under compile.
        if self._roots is not None:
            self._roots.remove()
            self._roots = None
        if self._return is not None:
            self._return.remove()
        self._return = module.register_forward_hook(self._root_returned, always_call=True)
        self.read(module)

    def _root_returned(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._return is not None:
            self._return.remove()
            self._return = None
            self._watch()

    def _fsdp_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._read_gathered(module)

    def _read_gathered(self, module: torch.nn.Module) -> None:
        try:
            self._add(gathered(module))
        except AttributeError as error:
            self.blind = f"torch {torch.__version__}: weights of FSDP are not readable: {error}"

    def _add(self, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            if is_plain(tensor):
                self._known.add(identity(tensor))
            elif (flat := flatten(tensor)) is not None:
                self._known.update(identity(leaf) for leaf in flat.leaves)

    def _forget_the_dead(self) -> None:
        self._known = {known for known in self._known if known() is not None}


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module itself."""
    # Whoever applied it has imported it; importing it here would take a second, and is not
    # possible in every build of torch.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether the module or one of its modules is wrapped in FSDP1, whose weights are flat."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(each, kind) for each in module.modules())


def gathered(module: Any) -> Iterator[torch.Tensor]:
    """The weights of an FSDP2 module as they are gathered now, and what they were gathered into.

    Raises:
        AttributeError: this torch keeps them elsewhere.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    for group in groups:
        if group is None:
            # A root all of whose parameters are in groups of its modules.
            continue
        for weight in group.fsdp_params:
            yield from weight.all_gather_outputs
            # Not there before the first gathering.
            whole = getattr(weight, "_unsharded_param", None)
            if whole is not None:
                yield whole
