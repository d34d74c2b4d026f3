"""What transformers' own code of a model does with attention: traced once without memory, on the device `meta`, before
any weight is read.

Transformers lets a program put its own attention into a model (`AttentionInterface`). A trace tells how many attentions
a token goes through, how large their heads are and how far each looks back. What a cache of keys and values cannot
serve is refused here by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.host.extras import install_command, require_extra
from gpuinfer.text.checkpoint.config_keys import ENCODERS, ConfigFields, read_json

OURS, TRACED = "gpuinfer", "gpuinfer-trace"  # names of attentions that are registered with transformers
DECODER_ATTRIBUTE = "gpuinfer_attention"  # of a module with attention: the function that computes it
TOKENS = 8  # that a trace passes through
EXPERTS = "experts"  # what a module that holds experts is called
MOST_LOOKED = 1 << 17  # positions that a mask is asked about
OLDEST = 5  # version of transformers
UNKNOWN_POSITIONS = 4096  # of a model that does not say how long a context it was made for
PLAIN_LAYERS = ("full_attention", "sliding_attention")
ANOTHER = "Use --backend vllm, where vLLM serves it, or run it with transformers."
_registering = threading.RLock()


@dataclass(frozen=True)
class AttentionCall:
    """One attention that a token goes through, by the name of its module: heads, the sizes of their keys and values,
    and the positions that it looks back, itself included; None: all.
    """

    module: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class TracedModel:
    """`calls` in the order in which a token meets them; `values`: of all parameters, each counted once. `linears`: by
    name the linear layers that each token goes through once, with their outputs and inputs: what an adapter may add
    to. The head and what stands for experts are not among them.
    """

    config: Any  # transformers' own
    calls: tuple[AttentionCall, ...]
    vocabulary: int
    values: int
    mixed: bool  # it has experts
    keeps_logits: bool  # its forward takes `logits_to_keep`
    linears: Mapping[str, tuple[int, int]]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers without progress bars and advice; the settings are those of the whole process."""
    import transformers

    logging: Any = transformers.utils.logging
    with _registering:
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def register_attention() -> None:
    """Make our attention known to transformers: each module asks the decoder that it belongs to, so that models of one
    process do not meet.
    """
    from transformers import AttentionInterface

    if OURS not in AttentionInterface._global_mapping:
        AttentionInterface.register(OURS, _of_its_decoder)


def _of_its_decoder(module: torch.nn.Module, *given: Any, **named: Any) -> tuple[Tensor, None]:
    found: tuple[Tensor, None] = getattr(module, DECODER_ATTRIBUTE)(module, *given, **named)
    return found


def need_transformers() -> None:
    """Raises `UsageError` where transformers is not installed, or is too old."""
    require_extra("transformers", "a model of this family, which transformers' own code computes,")
    from transformers import __version__

    if int(__version__.partition(".")[0]) < OLDEST:
        raise UsageError(
            f"a model of this family is computed by transformers' own code, from version {OLDEST} on, and transformers "
            f"is {__version__}. Run: {install_command('transformers')}"
        )


def read_transformers_config(folder: Path) -> Any:
    """Transformers' configuration of a folder. Nothing is fetched, and no code of the folder's own is run.

    Raises `UsageError` for a type that the installed transformers does not know, or settings that it rejects.
    """
    need_transformers()
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = read_json(folder / "config.json")
    kind = str(values.get("model_type"))[:60]
    ConfigFields(values, str(folder / "config.json")).mapping(
        "quantization_config"
    )  # which transformers does not check
    if kind not in CONFIG_MAPPING:
        if values.get("auto_map"):
            raise UsageError(
                f"{folder / 'config.json'} asks to run code of its own (auto_map), which never runs here, and "
                f"transformers {__version__} has none for type '{kind}'. Install a newer transformers, or use "
                "--backend vllm --trust-remote-code."
            )
        raise UsageError(
            f"the model is of type '{kind}', which neither a native decoder nor transformers {__version__} knows. "
            "Install a newer transformers (pip install --upgrade transformers), or use --backend vllm."
        )
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  checks of its own, of any kind
        raise UsageError(
            f"{folder / 'config.json'}: transformers rejects it: {first_words(error)}. Copy it again from where the "
            "model came."
        ) from None


def first_words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200].rstrip(".")


def traced(config: Any) -> TracedModel:
    """Trace the model of transformers' own `config`. Raises `UsageError`, by the family's name, for what is no decoder,
    keeps a state, makes masks of its own, or computes attention where ours cannot be put in.
    """
    return _traced(type(config).__name__, json.dumps(config.to_dict(), sort_keys=True, default=str), _Given(config))


class _Given:
    """A configuration that does not count in a cache's key: its text does."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=8)
def _traced(kind: str, text: str, given: _Given) -> TracedModel:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config, name = copy.deepcopy(given.config), f"a {given.config.model_type} model"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.model_type in ENCODERS:
        raise UsageError(
            f"{name} writes no text from left to right, so no backend of gpuinfer serves it. Run it with transformers."
        )
    _refuse_by_name(config, model_class, name)
    trace = _Trace()
    with _registering:
        AttentionInterface.register(TRACED, _recorded)
        AttentionMaskInterface.register(TRACED, _asked_for)
    _current.trace = trace
    try:
        config._experts_implementation = "batched_mm"  # no size depends on which experts are chosen
        with quiet(), torch.no_grad(), torch.device("meta"):
            make: Any = AutoModelForCausalLM
            model = make.from_config(config, attn_implementation=TRACED).eval()
            for module, layer_type in growing_rotary(model):
                settle_rotary(module, layer_type)
            linears = _Linears(model)
            ones = torch.ones((1, TOKENS), dtype=torch.int64)
            numbers = torch.arange(TOKENS)[None]
            found = model(input_ids=ones, attention_mask=ones, position_ids=numbers, use_cache=False)
    except KeyError as error:
        if error.args and error.args[0] == TRACED:
            raise _no_interface(name) from None
        raise _cannot_follow(name, error) from None
    except Exception as error:  # noqa: BLE001  of any kind, in code that is not ours
        raise _cannot_follow(name, error) from None
    finally:
        _current.trace = None
    layers = int(getattr(config.get_text_config(), "num_hidden_layers", 0) or 0)
    if not trace.calls:
        raise _no_interface(name)
    if layers and len(trace.calls) % layers:
        raise UsageError(
            f"{name} has {layers} layers, of which {len(trace.calls)} have attention like that of a decoder: the "
            f"others keep something else than keys and values. {ANOTHER}"
        )
    names = {id(module): name for name, module in model.named_modules()}
    calls = tuple(trace.call(number, names, config, name) for number in range(len(trace.calls)))
    classes = {type(module).__name__.lower() for module in model.modules()}
    return TracedModel(
        given.config,
        calls,
        int(found.logits.shape[-1]),
        sum(one.numel() for one in {id(one): one for one in model.parameters()}.values()),
        any(word in one for one in classes for word in ("experts", "moe", "router")),
        "logits_to_keep" in inspect.signature(model.forward).parameters,
        linears.each_token_once(),
    )


def growing_rotary(model: torch.nn.Module) -> Iterator[tuple[Any, str | None]]:
    """Modules with rotary positions that transformers adapts to the longest row of a batch; with kinds of layers where
    they have several.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope" or "dynamic" in str(kind):
                yield module, layer_type


def settle_rotary(module: Any, layer_type: str | None) -> None:
    """Have a module of `growing_rotary` keep the angles that it has."""
    module.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}


def _refuse_by_name(config: Any, model_class: Any, name: str) -> None:
    own = config.get_text_config()
    values: Mapping[str, Any] = own.to_dict()
    if values.get("is_encoder_decoder") or config.is_encoder_decoder:
        raise UsageError(
            f"{name} is an encoder with a decoder, and no backend of gpuinfer serves such models. Run it "
            "with transformers."
        )
    kinds = sorted({str(one) for one in values.get("layer_types") or ()} - set(PLAIN_LAYERS))
    layers = f"layers of kind {', '.join(kinds)}"
    if getattr(model_class, "_is_stateful", False):
        raise UsageError(
            f"{name} keeps a state from token to token{f' ({layers})' if kinds else ''}, and the cache here holds keys "
            f"and values alone. {ANOTHER}"
        )
    if kinds:
        raise UsageError(
            f"{name} has {layers}, and the cache here holds keys and values of plain ones alone. {ANOTHER}"
        )
    indexed = sorted(key for key in values if key.startswith("index_") and values[key])
    if indexed:
        raise UsageError(f"{name} chooses by an index of its own what it attends to ({indexed[0]}). {ANOTHER}")


def _no_interface(name: str) -> UsageError:
    return UsageError(
        f"{name} computes its attention in code of its own, which transformers' AttentionInterface does not reach. "
        f"{ANOTHER}"
    )


def _cannot_follow(name: str, error: Exception) -> UsageError:
    return UsageError(f"{name} cannot be followed through transformers' code: {first_words(error)}. {ANOTHER}")


def positions_of_config(config: Any) -> int:
    """The longest context that a model was made for, as its configuration says."""
    own = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
        found = getattr(own, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return UNKNOWN_POSITIONS


class _Current(threading.local):
    trace: _Trace | None = None


_current = _Current()


class _Trace:
    """The attentions of one pass, and the masks that they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]] = []
        self.masks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = {}

    def call(self, number: int, names: Mapping[int, str], config: Any, name: str) -> AttentionCall:
        """Raises `UsageError` for a mask that is neither causal nor a window."""
        module, query, key, value, mask, named = self.calls[number]
        own = UsageError(f"{name} decides with masks of its own what a token attends to. {ANOTHER}")
        if mask is not None and id(mask) not in self.masks:
            raise own
        strange = [one for one in ("position_bias", "indices", "block_indices") if named.get(one) is not None]
        if strange:
            raise UsageError(f"{name} gives its attention '{strange[0]}', which ours does not have. {ANOTHER}")
        if key.shape[2] != TOKENS or query.shape[2] != TOKENS or query.shape[1] % key.shape[1]:
            raise own
        window = named.get("sliding_window")
        if mask is not None:
            window = window_of(self.masks[id(mask)][1], positions_of_config(config))
            if window == 0:
                raise own
        return AttentionCall(names[id(module)], query.shape[1], key.shape[1], key.shape[3], value.shape[3], window)


class _Linears:
    """The linear layers of a model that goes through its trace."""

    def __init__(self, model: Any) -> None:
        from transformers.pytorch_utils import Conv1D  # GPT-2's: a linear layer with its weight transposed

        self._calls: dict[str, list[tuple[int, int, int]]] = {}  # rows, outputs, inputs
        head = model.get_output_embeddings()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head and EXPERTS not in name.split("."):
                module.register_forward_hook(functools.partial(self._called, name))

    def each_token_once(self) -> Mapping[str, tuple[int, int]]:
        """By name, outputs and inputs."""
        found = {name: calls[0] for name, calls in self._calls.items() if len(calls) == 1}
        return {name: (outputs, inputs) for name, (rows, outputs, inputs) in found.items() if rows == TOKENS}

    def _called(self, name: str, module: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        rows = given[0].numel() // given[0].shape[-1] if given else 0  # 0: by a name, which our hook does not see
        inputs = given[0].shape[-1] if given else 0
        self._calls.setdefault(name, []).append((rows, out.shape[-1], inputs))


def window_of(visible: Callable[..., Tensor], positions: int) -> int | None:
    """From a function of transformers that tells whether a query sees a key: how many positions it looks back, None for
    all, and 0 where it is neither.
    """
    positions = min(positions, MOST_LOOKED)
    keys, zero = torch.arange(positions + 1), torch.zeros((), dtype=torch.int64)
    seen: dict[int, int] = {}
    for place in (positions, positions - 1, positions * 3 // 4, positions // 2 + 1, positions // 3):
        shown = visible(zero, zero, torch.tensor(place), keys).expand(len(keys))
        seen[place] = int(shown.sum())
        if not bool(shown[place + 1 - seen[place] : place + 1].all()):
            return 0
    windows = {count for place, count in seen.items() if count <= place}
    if not windows:
        return None
    window = min(windows)
    return window if all(count == min(place + 1, window) for place, count in seen.items()) else 0


def _recorded(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *_: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    if _current.trace is not None:
        _current.trace.calls.append((module, query, key, value, attention_mask, named))
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None


def _asked_for(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    mask = torch.empty((1, 1, TOKENS, TOKENS), device="meta")
    if _current.trace is not None:
        _current.trace.masks[id(mask)] = (mask, mask_function)
    return mask
