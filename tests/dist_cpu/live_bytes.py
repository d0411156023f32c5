"""Memory of tensors, at its peak."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage._cdata not in inputs:
                self._seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _end(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
