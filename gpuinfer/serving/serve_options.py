"""The flags of `gpuinfer serve` that concern one server: which model, where it listens, who may ask."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gpuinfer import errors
from gpuinfer.api import ModelSpec
from gpuinfer.config import import_paths
from gpuinfer.config.setup_file import ToolFormatName
from gpuinfer.errors import UsageError
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.models.row_layout import ARRAY_DTYPES, FLAT_DTYPES, array_spec
from gpuinfer.serving.openai.model_options import (
    TEXT_MODELS,
    AdapterOptions,
    ModelOptions,
    adapter_folders,
    check_model,
    check_with_model,
    models_in,
    text_model,
    values_by_model,
)
from gpuinfer.serving.openai.sampling_fields import UNMASKING_FIELDS, UnmaskingOptions, unmasking_of
from gpuinfer.text import text_options

NETWORKS = ("blobnet", "blobnet-small")  # `models.networks` imports torch
FEATURES, ACTIONS, SEATS = 256, 53, 4  # of a built-in network, where nobody says otherwise
WANTED = (
    "serve needs a model: give --model DIR with a checkpoint's folder, --model tiny to try it out, "
    "--model blobnet or --model module:factory for a network of rows."
)
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s,]+")
HERE = ("127.0.0.1", "::1", "localhost")
MOST_SHARE = 1000.0  # of one model, where another has 1
OF_ROWS = ("weights", "features", "actions", "seats")  # flags of networks of rows
MOST = {"features": 1 << 20, "actions": 1 << 20, "seats": 1 << 10}
FLOAT32 = "float32"
CLIENT_NAME = r"[A-Za-z0-9._:@+/-]{1,200}"  # of a model
OF_TEXT = (*UNMASKING_FIELDS, "mask_token_id")


class ServeOptions(UnmaskingOptions, AdapterOptions, ModelOptions):
    """One server's flags."""

    model: str | None = Field(
        None,
        description="a folder with a checkpoint, tiny, blobnet, blobnet-small, or module:factory; "
        "several at once as NAME=DIR,NAME=DIR",
        json_schema_extra={"names": [*TEXT_MODELS, *NETWORKS]},
    )
    share: str | None = Field(None, description="of several models: of the device, as NAME=2,NAME=1 [equal]")
    weights: Path | None = Field(
        None, description="of a network of rows: its weights, a safetensors file; of several NAME=FILE,NAME=FILE"
    )
    features: int | str | None = Field(
        None,
        description="of a network of rows: values in one row, or its shape, as 3x32x32; of several NAME=8,NAME=256, or "
        "one for all",
    )
    actions: int | str | None = Field(None, description="of a network for games: its moves; of several likewise")
    seats: int | str | None = Field(None, description="of a network for games: its players; of several likewise")
    input_dtype: str = Field(
        "float32",
        description="what the rows are made of: float32, uint8, int8 or bits; also float16, float64, int16, int32, "
        "int64 or bool; of several likewise",
    )
    served_model_name: str | None = Field(
        None,
        pattern=rf"^{CLIENT_NAME}(,{CLIENT_NAME})*$",
        description="how clients name the model [its folder's name]; several a,b: the first is in answers and metrics",
    )
    tool_format: ToolFormatName = Field(
        "auto", description="how a chat model writes calls of tools; auto: as its chat template shows"
    )
    reasoning: Literal["auto", "none"] = Field(
        "auto", description="auto: what stands between <think> and </think> is told apart from answers to chats"
    )
    host: str = Field("127.0.0.1", description="the address to listen at")
    port: int = Field(8000, ge=0, le=65_535, description="0: one that is free")
    api_key_file: Path | None = Field(
        None, description="the keys of clients, one a line: KEY, or KEY name=alice requests=60 tokens=100000, a minute"
    )
    admin_key_file: Path | None = Field(None, description="the keys of those who may change what runs")
    insecure: bool = Field(False, description="let anyone in, at an address that others reach")
    allowed_hosts: list[str] = Field([], description="names by which clients may call this server: a.example,b.example")
    allowed_origins: list[str] = Field(
        [], description="whose web pages may ask (CORS): https://a.example,https://b.example, or * for all"
    )
    tls_cert: Path | None = Field(None, description="speak HTTPS with this certificate and its chain, a PEM file")
    tls_key: Path | None = Field(None, description="the certificate's key, a PEM file")
    drain_timeout: float = Field(30.0, ge=0, le=86_400, description="seconds that requests have to finish at the end")
    max_body: int = Field(64 << 20, ge=1 << 10, le=1 << 32, description="bytes of one request's body, at most")
    max_connections: int = Field(8192, ge=1, le=1 << 20, description="connections at once")
    log_format: Literal["plain", "json"] = Field(
        "plain", description="json: a line of JSON for each message, and one for each request, as -v has them"
    )
    otlp_endpoint: str | None = Field(
        None, description="an OpenTelemetry collector, for spans, metrics and the log: http://host:4318"
    )
    setup_file: Path | None = Field(None, description="a server described in a file, in place of --model")
    ready_file: Path | None = Field(
        None, description="written once the server is ready, for scripts: {host, port, pid}"
    )
    leave_with_parent: bool = Field(False, description="end with whoever holds the standard input")
    behind_router: bool = Field(False, description="believe what only our own router may say of a request")


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """One of the models that the flags name."""

    name: str | None  # by which clients ask for it; None: as it is called
    aliases: tuple[str, ...]  # its other names for clients
    spec: ModelSpec
    unmasking: Unmasking | None = None  # where a request does not say
    share: float = 1.0


def chosen_models(own: ServeOptions) -> list[ChosenModel]:
    """The models that the flags name, at least one. Raises `UsageError`."""
    named = None if own.model is None else models_in(own.model)
    if named is None:
        if own.share is not None:
            raise UsageError("--share divides a device between several models. Leave it out, or give --model A=…,B=….")
        spec = served_spec(own)
        names = [] if own.served_model_name is None else own.served_model_name.split(",")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"--served-model-name {own.served_model_name}: '{twice}' stands there twice. Give it once."
            )
        _refuse_adapters_of_these_names(names, [spec])
        name, aliases = names[0] if names else None, tuple(names[1:])
        return [ChosenModel(name, aliases, spec, default_unmasking(own, spec))]
    if own.served_model_name is not None:
        raise UsageError("--served-model-name is of one model, and --model names them. Leave it out.")
    texts = [name for name, place in named.items() if not is_of_rows(place)]
    networks = [name for name in named if name not in texts]
    for name in ("checkpoint", "meta", "dcp_path", "base_model"):
        if getattr(own, name) is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} names a model, and --model does that already. Serve it alone, or leave it out.")
    for name in OF_TEXT:
        if len(texts) > 1 and getattr(own, name) not in (None, {}):
            raise UsageError(
                f"{_flag(name)} is said of one model of text, and there are {len(texts)}: {', '.join(texts)}. "
                "Leave it out, and say it in the requests."
            )
    weights, shares, adapters = _weights(own, networks), _shares(own, named), _adapters(own, texts)
    sizes = _sizes(own, networks)
    found = []
    for name, place in named.items():
        told: dict[str, Any] = {"model": place, "weights": weights.get(name), "adapter": adapters.get(name, [])}
        told |= dict.fromkeys(OF_ROWS) if name in texts else {**dict.fromkeys(OF_TEXT), **sizes[name]}
        one = own.model_copy(update=told)
        with errors.naming(name):
            spec = served_spec(one)
            unmasking = default_unmasking(one, spec) if name in texts else None
        found.append(ChosenModel(name, (), spec, unmasking, shares.get(name, 1.0)))
    _refuse_adapters_of_these_names(list(named), [one.spec for one in found])
    return found


def _refuse_adapters_of_these_names(names: Sequence[str], specs: Sequence[ModelSpec]) -> None:
    """Raises `UsageError` for an adapter that has a model's name for clients: a request could not name it."""
    for name in names:
        if any(name in (spec.arguments.get("adapters") or {}) for spec in specs):
            raise UsageError(f"'{name}' is the name of a model and of an adapter. Give one of both another name.")


def _weights(own: ServeOptions, networks: Sequence[str]) -> dict[str, Path]:
    """Of each network of rows. A file alone is that of the only one."""
    if own.weights is None:
        return {}
    if not networks:
        raise UsageError("--weights is said of a network of rows, and none is served. Leave it out.")
    if len(networks) == 1 and "=" not in str(own.weights):
        return {networks[0]: own.weights}
    known = dict.fromkeys(networks, "")
    found = values_by_model("--weights", str(own.weights), known, "NAME=FILE,NAME=FILE")
    return {name: Path(file) for name, file in found.items()}


def _sizes(own: ServeOptions, networks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the flags say of the rows of each network: one word is said of all of them."""
    found: dict[str, dict[str, Any]] = {name: {"input_dtype": FLOAT32} for name in networks}
    for flag in (*MOST, "input_dtype"):
        value, known = getattr(own, flag), dict.fromkeys(networks, "")
        if isinstance(value, str) and "=" in value:
            given: Mapping[str, Any] = values_by_model(f"--{flag.replace('_', '-')}", value, known, "NAME=…,NAME=…")
        else:
            given = dict.fromkeys(networks, value)
        for name, one in given.items():
            found[name][flag] = one
        for name in known.keys() - given.keys():
            found[name].setdefault(flag, None)
    return found


def _number(own: ServeOptions, flag: str) -> int | None:
    """Raises `UsageError` for what is no whole number in its range."""
    value = getattr(own, flag)
    if value is None:
        return None
    if not str(value).strip().isdecimal() or not 1 <= int(value) <= MOST[flag]:
        raise UsageError(f"--{flag} {value}: not a whole number from 1 to {MOST[flag]:,}. Write --{flag} 256.")
    return int(value)


def _shares(own: ServeOptions, named: Mapping[str, str]) -> dict[str, float]:
    if own.share is None:
        return {}
    found = {}
    for name, text in values_by_model("--share", own.share, named, "NAME=2,NAME=1").items():
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 1 / MOST_SHARE <= share <= MOST_SHARE:
            raise UsageError(
                f"--share {own.share}: {text} is no share. Write a number from {1 / MOST_SHARE:g} to {MOST_SHARE:g}."
            )
        found[name] = share
    return found


def _adapters(own: ServeOptions, texts: Sequence[str]) -> dict[str, list[str]]:
    """`MODEL:NAME=DIR` of each model of text; without a model those of the only one."""
    found: dict[str, list[str]] = {}
    for word in own.adapter:
        model, colon, rest = word.partition(":")
        if colon and model in texts and "=" in rest:
            found.setdefault(model, []).append(rest)
        elif len(texts) == 1:
            found.setdefault(texts[0], []).append(word)
        else:
            names = f"Choose from {', '.join(texts)}: " if texts else "No model of text is served: leave it out. "
            raise UsageError(f"--adapter {word}: of which model? {names}--adapter MODEL:NAME=DIR.")
    return found


def served_spec(own: ServeOptions) -> ModelSpec:
    """The one model that the flags name. Raises `UsageError`."""
    if own.model is None and own.checkpoint is None and own.dcp_path is None:
        raise UsageError(WANTED)
    check_model(own, "serve")
    if own.model is None or not is_of_rows(own.model):
        for name in OF_ROWS:
            if getattr(own, name) is not None:
                raise UsageError(
                    f"--{name} is said of a network of rows, and {text_model(own).name} is a model of text. "
                    f"Leave it out, or give --model {' or '.join(NETWORKS)} or module:factory."
                )
        return text_model(own, adapters=adapter_folders(own.adapter))
    if own.adapter:
        raise UsageError(f"--adapter is said of a model of text, and {own.model} takes rows. Leave it out.")
    for name in OF_TEXT:
        if getattr(own, name) not in (None, {}):
            raise UsageError(f"{_flag(name)} is said of a diffusion model, and {own.model} takes rows. Leave it out.")
    known = dict.fromkeys((*FLAT_DTYPES, *ARRAY_DTYPES))
    if own.input_dtype not in known:
        raise UsageError(f"--input-dtype {own.input_dtype}: no such kind. Choose from {', '.join(known)}.")
    built_in = own.model in NETWORKS
    shaped = re.search(r"\dx", str(own.features).lower()) is not None  # 3x32x32
    if (shaped or own.input_dtype not in FLAT_DTYPES) and built_in:
        raise UsageError(f"{own.model} takes flat features in {', '.join(FLAT_DTYPES)}. Give --features N.")
    features = own.features if shaped else _number(own, "features") or (FEATURES if built_in else None)
    if features is None:
        raise UsageError(
            f"{own.model} takes rows, and nobody says how long they are. Give --features N, or a shape, such as "
            "--features 3x32x32."
        )
    usual = {"actions": ACTIONS, "seats": SEATS} if built_in else {}
    sizes = {name: _number(own, name) or usual.get(name) for name in ("actions", "seats")}
    spec = array_spec(own.model, str(own.weights) if own.weights else None, features, own.input_dtype)
    return replace(spec, arguments={name: value for name, value in sizes.items() if value is not None})


def is_of_rows(name: str) -> bool:
    """Whether it names a network of rows: one of ours, or module:factory."""
    return name in NETWORKS or (":" in name and not Path(name).is_dir())


def _flag(name: str) -> str:
    return "-D" if name == "decoder_options" else f"--{name.replace('_', '-')}"


def default_unmasking(own: ServeOptions, spec: ModelSpec) -> Unmasking | None:
    """How masks are filled in where a request does not say. Raises `UsageError` for a model that cannot."""
    wanted = unmasking_of(own)
    if wanted is not None:
        check_with_model(spec, Sampling(unmasking=wanted))
    return wanted


def check_models_exist(spec: ModelSpec, finds_models: bool = False) -> None:
    """Raises `UsageError` for one that is not there, by name and by weights' file. Nothing of it is read, and nothing
    heavy is imported. `finds_models`: as the backend says of models of text.
    """
    if spec.weights is not None and not Path(spec.weights).exists():
        raise UsageError(f"no weights file {spec.weights}. Check --weights.")
    if ":" in spec.name and spec.kind == "rows":
        import_paths.refuse_absent_module(spec.name)
    elif spec.kind == "text" and spec.weights is None and not finds_models:
        text_options.refuse_absent(spec.name, TEXT_MODELS)


def check_address(own: ServeOptions) -> None:
    """Raises `UsageError` for an address that others reach, without a key and without a word that this is meant; for
    origins that are none, and half of what TLS needs.
    """
    for origin in own.allowed_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allowed-origins {origin}: no origin. Write scheme, name and port where it is not the usual one, "
                "such as https://app.example.org, or * for all."
            )
    if (own.tls_cert is None) != (own.tls_key is None):
        raise UsageError("TLS needs a certificate and its key. Give both: --tls-cert FILE --tls-key FILE.")
    if own.host in HERE or own.api_key_file is not None or own.insecure:
        return
    raise UsageError(
        f"--host {own.host} lets others in. Give --api-key-file FILE with keys (openssl rand -hex 32 > FILE; "
        "chmod 600 FILE), or say --insecure if everybody may."
    )
