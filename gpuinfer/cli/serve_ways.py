"""What `gpuinfer bench serve --compare` compares: servers at URLs, or our own with other flags, or other loads."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuinfer.cli import flags
from gpuinfer.cli.variants import parts
from gpuinfer.config import registry
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.routing.policy import POLICIES

if TYPE_CHECKING:
    from gpuinfer.bench.serve.sender import Load
    from gpuinfer.bench.serve.ways import Way

URL = "url"
PLUGINS = {"S": ("-S", "strategy"), "B": ("-B", "backend")}  # `S.max_wait=0,5ms`: -S max_wait=0, -S max_wait=5ms
OF_ANY = ("model", "features", "api_key_file")  # of a server at a URL too: what it is asked for, and with which key
LOADS = ("concurrency", "rate", "input_tokens", "output_tokens")
EXAMPLES = "replicas=1,2,4, routing=least-loaded,sticky, strategy=dynamic,adaptive, S.max_wait=0,5ms, or URLs"


@dataclass(frozen=True)
class Server:
    """The flags of `gpuinfer serve` as it knows them: which there are, and those that were given, as words."""

    known: Mapping[str, str]  # name → the flag that is written
    given: Mapping[str, Sequence[str]]  # name → words

    def words(self, chosen: Mapping[str, str]) -> list[str]:
        """The command line, with these values in place of those that were given."""
        words = [word for name, given in self.given.items() if name not in chosen for word in given]
        for name, value in chosen.items():
            kind, _, key = name.partition(".")
            words += [PLUGINS[kind][0], f"{key}={value}"] if kind in PLUGINS and key else [self.known[name], value]
        return words

    def value(self, name: str) -> str | None:
        words = self.given.get(name)
        return words[-1] if words else None


def expand(
    compare: Sequence[str],
    url: str | None,
    server: Server,
    load_of: Callable[[Mapping[str, str], int], Load],
    command: Callable[[Mapping[str, str]], str],
) -> list[Way]:
    """All combinations in the order in which they are named, the last axis fastest. Raises `UsageError`.

    `load_of(changes, replicas)`: the load with some of its flags changed; `command`: what runs one way by itself.
    """
    from gpuinfer.bench.serve.ways import Way

    axes = _axes(compare, server)
    if url is not None and URL in axes:
        raise UsageError("the URL and --compare both say who is asked. Leave one of them out.")
    ours = [name for name in axes if name != URL and name not in LOADS]
    ours_alone = [words[0] for name, words in server.given.items() if name not in OF_ANY]
    if (url is not None or URL in axes) and (ours or ours_alone):
        flag = flags.flag(ours[0]) if ours else ours_alone[0]
        raise UsageError(f"{flag} is said of a server that is started here, and a URL has one already. Leave one out.")
    found = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        there = chosen.get(URL, url)
        own = {name: value for name, value in chosen.items() if name != URL and name not in LOADS}
        replicas = _count(own.get("replicas") or server.value("replicas"))
        found.append(
            Way(
                name=_name(chosen) or (there or "serve").removeprefix("http://"),
                load=load_of({name: value for name, value in chosen.items() if name in LOADS}, replicas),
                settings=chosen,
                url=None if there is None else base(there),
                words=() if there is not None else server.words(own),
                replicas=replicas,
                command=command(chosen),
            )
        )
    return found


def base(url: str) -> str:
    """The address without the path that OpenAI's clients are given. Raises `UsageError` for what is none."""
    found = url.strip().rstrip("/").removesuffix("/v1")
    if not found.startswith("http://"):
        cure = "Give http://HOST:PORT" + (
            ", before the proxy that speaks TLS." if found.startswith("https://") else "."
        )
        raise UsageError(f"'{url}' is no address that is asked here. {cure}")
    return found


def _axes(compare: Sequence[str], server: Server) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for word in compare:
        key, values = _split(word, server)
        axes[key] = list(dict.fromkeys([*axes.get(key, []), *values]))
    return axes


def _split(word: str, server: Server) -> tuple[str, list[str]]:
    found = parts(word)
    if found and all(one.startswith(("http://", "https://")) for one in found):
        return URL, found
    key, equals, listed = word.partition("=")
    if equals:
        return _key(key.strip().removeprefix("--"), server), parts(listed)
    for kind, known in _names().items():
        if found and all(name in known for name in found):
            return _key(kind, server), found
    raise UsageError(f"--compare {word}: what is that? Give {EXAMPLES}.")


def _key(key: str, server: Server) -> str:
    kind, dot, option = key.partition(".")
    kind = {"strategy": "S", "backend": "B"}.get(kind, kind) if dot else kind
    if dot and option and kind in PLUGINS:
        return f"{kind}.{option}"
    name = key.replace("-", "_")
    if name in server.known or name in LOADS or name == URL:
        return name
    raise UnknownName("setting to compare", key, {*server.known, *LOADS, URL}, label="Settings")


def _names() -> dict[str, Sequence[str]]:
    """What may stand without a key."""
    return {
        "strategy": registry.names("strategies"),
        "routing": list(POLICIES),
        "backend": registry.names("backends"),
    }


def _name(chosen: Mapping[str, str]) -> str:
    """Such as `replicas=2, routing=sticky`; a URL and a plugin's name say by themselves what they are."""
    alone = (URL, "strategy", "routing", "backend")
    shown = {key: value.removeprefix("http://") if key == URL else value for key, value in chosen.items()}
    return ", ".join(value if key in alone else f"{key}={value}" for key, value in shown.items())


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else 1


def spelled(url: str | None, words: Sequence[str]) -> str:
    return shlex.join(["gpuinfer", "bench", "serve", *([url] if url else []), *words])
