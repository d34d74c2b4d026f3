"""How much memory a pass holds for its way back: counted by storage, as the CPU's allocator does not tell."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it: the bytes of all storages that operations have made and that are alive, `now` and at `most`.

    It costs some microseconds an operation: for one pass of a shape, not for each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._alive: dict[int, tuple[int, Any]] = {}  # by the storage's address: bytes, a reference that tells its end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_key(one) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(made):
            if isinstance(one, Tensor) and _key(one) not in given:
                self._enter(one)
        return made

    def leave(self, tensor: Tensor) -> None:
        """Its storage is something else from now on: a parameter's gradient, which is no activation."""
        self._leave(_key(tensor))

    def _enter(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = size, weakref.ref(storage, lambda _: self._leave(key))
        self.now += size
        self.most = max(self.most, self.now)

    def _leave(self, key: int) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self.now -= known[0]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
