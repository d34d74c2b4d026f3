"""LoRA adapters by name and version. vLLM finds cached keys and values by an adapter's name (vllm #42125), so a known
name must never get another adapter: each version has a name and a number of its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpuinfer.errors import BadPrompt, UsageError

SEPARATOR = "@"
LOW_RANK = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")


def refuse_misfit(model: Path, adapter: Path) -> None:
    """Compare the adapter's matrices with those of the same name in the model's folder. Names that are not found there,
    as those of quantised weights, are vLLM's to judge.

    Raises `UsageError` for an adapter that is of another shape, damaged or missing.
    """
    from safetensors import SafetensorError, safe_open

    def sizes_in(files: Iterable[Path]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for file in files:
            with safe_open(file, framework="numpy") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        return found

    path = adapter / "adapter_model.safetensors"
    if not (path.is_file() and (adapter / "adapter_config.json").is_file()):
        raise UsageError(
            f"there is no adapter in '{adapter}': it needs adapter_config.json and adapter_model.safetensors. Give a "
            "folder as PEFT saves it (save_pretrained)."
        )
    try:
        given = sizes_in([path])
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Copy it again.") from None
    known = sizes_in(sorted(model.glob("*.safetensors")) if model.is_dir() else ())
    for name, size in given.items():
        if (part := LOW_RANK.fullmatch(name)) is None or len(whole := known.get(f"{part[1]}.weight", [])) != 2:
            continue
        side, own, wanted = ("inputs", size[-1], whole[1]) if part[2] == "A" else ("outputs", size[0], whole[0])
        if own != wanted:
            raise UsageError(
                f"the adapter in '{adapter}' is for another model: {part[1]} has {own} {side}, and this model's has "
                f"{wanted}. Give one that was made for this model."
            )


@dataclass
class VllmAdapter:
    """One version of an adapter, as the engine has it."""

    name: str
    version: str
    folder: str
    number: int
    users: int = field(default=0)  # answers under way that it computes

    @property
    def called(self) -> str:
        return f"{self.name}{SEPARATOR}{self.version}" if self.version else self.name


Load = Callable[[VllmAdapter], Awaitable[None]]


class VllmAdapters:
    """At most `most` versions, and more for as long as answers are under way with them.

    `load` and `unload` tell the engine; `load` raises `UsageError` for an adapter that it cannot use.
    """

    def __init__(self, load: Load, unload: Load, most: int) -> None:
        self._load, self._unload, self._most = load, unload, most
        self._newest: dict[str, VllmAdapter] = {}
        self._known: dict[str, VllmAdapter] = {}  # by `called`; the one used last comes last
        self._left: set[int] = set()  # without a name, and with answers under way
        self._numbers = itertools.count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that prompts may use, with and without versions."""
        return tuple(sorted({*self._newest, *self._known}))

    def found(self, name: str) -> None:
        """Note an adapter that the engine has already, under this name."""
        one = VllmAdapter(name, "", "", next(self._numbers))
        self._newest[name] = self._known[name] = one

    async def add(self, name: str, version: str, folder: str) -> None:
        """Load a version, which `name` means from now on. Raises `UsageError`, with nothing changed."""
        if not name or SEPARATOR in name or name != name.strip():
            raise UsageError(
                f"an adapter cannot be called '{name}'. Use a name without spaces around it and without @."
            )
        if name not in self._newest and len(self._newest) >= self._most:
            raise UsageError(
                f"{self._most} adapters are loaded ({', '.join(sorted(self._newest))}), and there is room for no more. "
                f"Unload one, or start with -B max_adapters={2 * self._most}."
            )
        one = VllmAdapter(name, version, folder, next(self._numbers))
        await self._load(one)
        replaced = self._known.pop(one.called, None)
        self._newest[name] = self._known[one.called] = one
        if replaced is not None:
            await self._unload_unused(replaced)
        # the versions used longest ago go, but none that is the newest of its name
        old = [one for one in self._known.values() if self._newest.get(one.name) is not one]
        for one in old[: max(0, len(self._known) - self._most)]:
            del self._known[one.called]
            await self._unload_unused(one)

    async def remove(self, asked: str) -> None:
        """Remove an adapter with all its versions, or the version that is named; answers under way keep it.

        Raises `UsageError` for an unknown one.
        """
        gone = [one for one in self._known.values() if asked in (one.name, one.called)]
        if not gone:
            raise UsageError(f"there is no adapter '{asked}'. Loaded: {', '.join(self.names) or 'none'}.")
        for one in gone:
            del self._known[one.called]
            if self._newest.get(one.name) is one:
                del self._newest[one.name]
            await self._unload_unused(one)

    def use(self, asked: str) -> VllmAdapter:
        """The adapter for a prompt: its newest version by name, or the one of name and version. `release` it later.

        Raises `BadPrompt` for an unknown one.
        """
        one = self._newest.get(asked) or self._known.get(asked)
        if one is None:
            raise BadPrompt(
                f"it asks for the adapter '{asked}', and the engine has {', '.join(self.names) or 'none'}. Load it, or "
                "leave `adapter` out."
            )
        self._known[one.called] = self._known.pop(one.called)
        one.users += 1
        return one

    async def release(self, one: VllmAdapter) -> None:
        one.users -= 1
        if one.number in self._left:
            await self._unload_unused(one)

    async def _unload_unused(self, one: VllmAdapter) -> None:
        """Unload an adapter without a name, at once or after its last answer."""
        self._left.add(one.number)
        if not one.users:
            self._left.discard(one.number)
            await self._unload(one)
