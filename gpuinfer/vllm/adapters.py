"""LoRA adapters by name and version. vLLM must never be given another adapter under a name that it knows: what it has
cached of keys and values it finds by that name (vllm #42125). So each version has a name and a number of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.vllm.state import AdapterState

SEPARATOR = "@"


@dataclass
class Loaded:
    """One version of an adapter, as the engine has it."""

    name: str
    version: str
    folder: str
    number: int
    users: int = field(default=0)  # answers under way that it computes

    @property
    def called(self) -> str:
        return f"{self.name}{SEPARATOR}{self.version}" if self.version else self.name


Load = Callable[[Loaded], Awaitable[None]]


class Adapters:
    """`load` and `unload` tell the engine; `load` raises `UsageError` for an adapter that it cannot use."""

    def __init__(self, load: Load, unload: Load) -> None:
        self._load, self._unload = load, unload
        self._newest: dict[str, Loaded] = {}
        self._loaded: dict[str, Loaded] = {}  # by what they are called
        self._numbers = 0

    @property
    def newest(self) -> Sequence[AdapterState]:
        return [AdapterState(one.name, one.version, one.folder) for one in self._newest.values()]

    @property
    def names(self) -> Sequence[str]:
        return sorted(self._loaded)

    async def add(self, name: str, version: str, folder: str) -> None:
        """What `name` means for prompts from now on. Raises `UsageError`."""
        refuse_odd(name, folder)
        self._numbers += 1
        one = Loaded(name, version, folder, self._numbers)
        if one.called in self._loaded:
            raise UsageError(f"the adapter '{one.called}' is loaded already. Give its new weights another version.")
        await self._load(one)
        before = self._newest.get(name)
        self._newest[name] = self._loaded[one.called] = one
        if before is not None:
            await self._let_go(before)

    async def remove(self, name: str) -> None:
        """Prompts may not ask for it any more; answers under way are finished with it."""
        one = self._newest.pop(name, None)
        if one is None:
            raise UsageError(f"there is no adapter '{name}'. Loaded: {', '.join(self.names) or 'none'}.")
        await self._let_go(one)

    def use(self, name: str) -> Loaded:
        """The adapter that a prompt asks for: by its name the newest, by name and version that one. `release` it.

        Raises `BadPrompt` when there is none.
        """
        one = self._newest.get(name) or self._loaded.get(name)
        if one is None:
            raise BadPrompt(
                f"it asks for the adapter '{name}', and the engine has {', '.join(self.names) or 'none'}. Load it, or "
                "leave `adapter` out."
            )
        one.users += 1
        return one

    async def release(self, one: Loaded) -> None:
        one.users -= 1
        await self._let_go(one)

    async def _let_go(self, one: Loaded) -> None:
        """Unload it, when it is the newest of its name no more and nobody uses it."""
        if one.users or self._newest.get(one.name) is one or self._loaded.get(one.called) is not one:
            return
        del self._loaded[one.called]
        await self._unload(one)


def refuse_odd(name: str, folder: str) -> None:
    """Raises `UsageError` for a name that prompts cannot ask for, or a folder without an adapter."""
    if not name or SEPARATOR in name or name != name.strip():
        raise UsageError(f"an adapter cannot be called '{name}'. Use a name without spaces around it and without @.")
    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        raise UsageError(f"there is no adapter in '{folder}': no adapter_config.json. Give a PEFT folder.")


def parsed(given: Mapping[str, str]) -> tuple[AdapterState, ...]:
    return tuple(AdapterState(name, "", folder) for name, folder in given.items())
