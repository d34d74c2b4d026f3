"""gpuinfer: a great many model answers from the accelerators you have.

In a program (`gpuinfer docs python` has a tutorial):

    import gpuinfer

    with gpuinfer.Batcher(model) as batcher:           # any torch.nn.Module, or a function of a batch
        y = batcher.predict(x)                         # one row, from any thread; rows of all callers share batches
        ys = list(batcher.map(xs))

    async with gpuinfer.Batcher(model) as batcher:
        y = await batcher(x, priority="high", timeout=0.2)

    with gpuinfer.LLM("folder") as llm:                # a checkpoint of text
        for answer in llm.generate(["Once", "The sea"], max_new_tokens=64):
            print(answer.text)

    games = gpuinfer.SelfPlay("connect-four", model=net, simulations=100)
    records = games.play(300)
    loader = DataLoader(gpuinfer.datasets.SelfPlayDataset("games"), batch_size=256)    # what `selfplay --out` wrote

    with gpuinfer.serve(model, example=x) as server:   # over HTTP: /v1/evaluate, of text OpenAI's API
        print(server.url)

Each of these says where its time went: `.stats()`, `.report()`, `.verdict()`, and `with batcher.live(): ...`.
The same from the command line: `gpuinfer --help`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer import datasets
    from gpuinfer.api import Priority
    from gpuinfer.central.server import CentralServer
    from gpuinfer.library.batcher import Batcher
    from gpuinfer.library.chat_answers import ChatAnswer, ToolCall
    from gpuinfer.library.choices import adaptive as Adaptive
    from gpuinfer.library.choices import by_priority as ByPriority
    from gpuinfer.library.choices import dynamic as Dynamic
    from gpuinfer.library.game_folder import GameRecords, PlayedGame
    from gpuinfer.library.llm import LLM
    from gpuinfer.library.measured import SessionVerdict
    from gpuinfer.library.model_group import Models
    from gpuinfer.library.selfplay import SelfPlay
    from gpuinfer.library.server import ModelServer, serve
    from gpuinfer.library.text_answers import TextAnswer
    from gpuinfer.library.text_scores import ContinuationScore

    __version__: str

__all__ = [
    "LLM",
    "Adaptive",
    "Batcher",
    "ByPriority",
    "CentralServer",
    "ChatAnswer",
    "ContinuationScore",
    "Dynamic",
    "GameRecords",
    "ModelServer",
    "Models",
    "PlayedGame",
    "Priority",
    "SelfPlay",
    "SessionVerdict",
    "TextAnswer",
    "ToolCall",
    "__version__",
    "datasets",
    "serve",
]

_PLACES = {
    "Adaptive": "library.choices:adaptive",
    "Batcher": "library.batcher:Batcher",
    "ByPriority": "library.choices:by_priority",
    "CentralServer": "central.server:CentralServer",
    "ChatAnswer": "library.chat_answers:ChatAnswer",
    "ContinuationScore": "library.text_scores:ContinuationScore",
    "Dynamic": "library.choices:dynamic",
    "GameRecords": "library.game_folder:GameRecords",
    "LLM": "library.llm:LLM",
    "Models": "library.model_group:Models",
    "PlayedGame": "library.game_folder:PlayedGame",
    "Priority": "api:Priority",
    "SelfPlay": "library.selfplay:SelfPlay",
    "ModelServer": "library.server:ModelServer",
    "serve": "library.server:serve",
    "SessionVerdict": "library.measured:SessionVerdict",
    "TextAnswer": "library.text_answers:TextAnswer",
    "ToolCall": "library.chat_answers:ToolCall",
    "datasets": "datasets",
}


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first used: `import gpuinfer` and `gpuinfer --help` load neither NumPy nor
    torch, and a worker process need not read packages' metadata.
    """
    if name == "__version__":
        found: Any = _version()
    elif place := _PLACES.get(name):
        module, _, attribute = place.partition(":")
        found = import_module(f"gpuinfer.{module}")
        found = getattr(found, attribute) if attribute else found
    else:
        raise AttributeError(f"module 'gpuinfer' has no attribute '{name}'. It offers {', '.join(__all__)}.")
    globals()[name] = found  # the next to ask need not come here
    return found


def __dir__() -> list[str]:
    """What completion offers: also what nobody has used yet."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpuinfer")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0.0.0"
