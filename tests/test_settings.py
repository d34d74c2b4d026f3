"""Flag > environment > file > default; each value knows its origin, and each complaint ends with the cure."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from gpuinfer.config import options, registry, settings
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError


def write(text: str, name: str = "gpuinfer.toml") -> None:
    Path(name).write_text(text)


@pytest.mark.parametrize(
    ("layers", "seed", "origin"),
    [
        pytest.param("", 0, "default", id="nothing given"),
        pytest.param("file", 1, "gpuinfer.toml seed", id="the file beats the default"),
        pytest.param("file environment", 2, "GPUINFER_SEED", id="the environment beats the file"),
        pytest.param("file environment flag", 3, "--seed", id="the flag beats all"),
        pytest.param("file flag", 3, "--seed", id="the flag beats the file"),
    ],
)
def test_the_nearest_layer_wins_and_is_named(count_package, layers, seed, origin, monkeypatch):
    if "file" in layers:
        write("seed = 1")
    if "environment" in layers:
        monkeypatch.setenv("GPUINFER_SEED", "2")
    merged = settings.load({"seed": GivenValue("3", "--seed")} if "flag" in layers else {})
    assert (merged.common.seed, merged.origin("seed")) == (seed, origin)


def test_layers_merge_key_by_key_and_another_file_can_be_named(count_package, monkeypatch):
    write('[count]\ngames = 5\norder = "down"\n[backends.parrot]\nmax_rows = "4k"')
    monkeypatch.setenv("GPUINFER_COUNT__GAMES", "6")
    monkeypatch.setenv("GPUINFER_BACKENDS__PARROT__SECONDS", "5ms")
    merged = settings.load()
    count, parrot = registry.load("workloads", "count"), registry.load("backends", "parrot")
    assert merged.options("workloads", "count", count) == {"games": "6", "order": "down"}
    assert merged.options("backends", "parrot", parrot) == {"max_rows": 4000, "seconds": 0.005}
    assert merged.origin("count.order") == "gpuinfer.toml [count] order"
    write("seed = 9", "other.toml")
    assert settings.load(config=Path("other.toml")).common.seed == 9
    monkeypatch.setenv("GPUINFER_CONFIG", "other.toml")
    assert settings.load().common.seed == 9


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda path: path.mkdir(), "is a folder", id="folder"),
        pytest.param(os.mkfifo, "is a pipe", id="pipe"),
        pytest.param(lambda path: path.symlink_to(path.name), "is a link that leads back to itself", id="circle"),
        pytest.param(lambda path: path.symlink_to("gone.toml"), "is a link that leads nowhere", id="link to nothing"),
        pytest.param(lambda path: path.symlink_to("/dev/null"), "is no file", id="device"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(empty_folder, make, said):
    make(Path("gpuinfer.toml"))
    for named in (None, Path("gpuinfer.toml")):
        with pytest.raises(UsageError, match=f"the settings file gpuinfer.toml {said}. (Put|Give) "):
            settings.load(config=named)


def test_disabled_plugins_are_off_once_settings_are_loaded_and_their_tables_may_stay(count_package, monkeypatch):
    write('disabled_plugins = ["backends.parrot"]\n[backends.parrot]\nseconds = 1\n[count]\ngames = 3')
    assert settings.load().table("count")["games"].value == 3
    assert "parrot" not in registry.names("backends")
    monkeypatch.setenv("GPUINFER_DISABLED_PLUGINS", "backends.inprocess, other")
    settings.load()
    assert "inprocess" not in registry.names("backends")


class Some(BaseModel):
    rows: int | None = Field(None, ge=1)
    seconds: float = Field(0.0, ge=0)
    name: str = "x"
    kind: Literal["none", "some"] = "some"
    stages: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    fast: bool = False
    tags: list[str] = []
    maybe: str | None = None
    where: Path | None = None
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, rows: int) -> int:
        if rows % 2:
            raise ValueError("an odd number cannot be halved. Give an even one")
        return rows


class Strict(BaseModel):
    needed: int


def taken(key: str, text: object, model: type[BaseModel] = Some) -> object:
    return getattr(model(**options.check(model, {key: GivenValue(text, f"-B {key}")}, "it")), key)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *(("rows", text, value) for text, value in [("4k", 4000), ("64Ki", 65536), ("1.5k", 1500), ("1_000", 1000)]),
        *(("seconds", text, value) for text, value in [("5ms", 0.005), ("2min", 120.0), ("1e-3", 0.001)]),
        *((key, "none", None) for key in ("rows", "maybe", "where")),
        *((key, "none", "none") for key in ("name", "kind")),
        ("name", "4k", "4k"),
        ("fast", "yes", True),
        ("fast", "off", False),
        ("tags", "a, b", ["a", "b"]),
    ],
)
def test_text_becomes_what_the_field_takes(key, text, value):
    assert taken(key, text) == value


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("stages", "0", "-B stages: '0' is less than 2. Give 2 or more, or auto."),
        ("stages", "some", "-B stages: 'some' is not a whole number. Give a whole number, or auto."),
        ("stages", "atuo", "-B stages: 'atuo' is not a whole number. Did you mean 'auto'? Give a whole number, or "
         "auto."),
        ("even", "3", "-B even: '3': an odd number cannot be halved. Give an even one."),
        ("rosw", 1, "-B rosw: it has no option 'rosw'. Did you mean 'rows'? Options: even, fast, kind, maybe, name, "
         "rows, seconds, stages, tags, where."),
    ],
)  # fmt: skip
def test_what_it_does_not_take_is_complained_about_once(key, text, said):
    with pytest.raises(UsageError) as refused:
        taken(key, text)
    assert str(refused.value) == said
    with pytest.raises(UsageError, match="it needs 'needed'"):
        options.check(Strict, {}, "it")


@given(st.one_of(st.integers(1, 10**12), st.floats(0, 1e9)))
def test_a_number_written_out_is_read_as_itself(number):
    assert taken("rows" if isinstance(number, int) else "seconds", str(number)) == number


@given(st.text(max_size=12))
def test_any_text_at_all_is_taken_or_is_a_usage_error(text):
    for key in Some.model_fields:
        with contextlib.suppress(UsageError):
            taken(key, text)


def test_no_workload_can_have_the_name_of_a_setting():
    assert set(registry.SETTINGS) == {*options.fields_of(settings.Common), *settings.TABLES}


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        *(("cuda:0,cuda:1", ("cuda:0", "cuda:1")), ("cpu+cpu", ("cpu", "cpu")), ("all", ("all",)), ("auto", ("auto",))),
        *((text, None) for text in ("cuda:0,", "all,cpu", "gpu", "cuda:x", "cpu,,cpu", "auto,auto")),
    ],
)
def test_several_devices_are_named_in_one_setting(empty_folder, text, devices):
    device = {"device": GivenValue(text, "--device")}
    if devices is not None:
        assert settings.load(device).common.devices == devices
    else:
        with pytest.raises(UsageError, match="--device"):
            settings.load(device)


def test_options_are_read_as_the_plugin_reads_them():
    given = {"generate.max_new_tokens": "16", "generate.input": "a.jsonl", "backends.inprocess.threads": "2"}
    merged = settings.Settings(settings.Common(), {key: GivenValue(one, f"--{key}") for key, one in given.items()})
    read = merged.read_options("workloads", "generate", registry.load("workloads", "generate"))
    assert read == {"max_new_tokens": 16, "input": "a.jsonl"}
    assert merged.read_options("backends", "inprocess", registry.load("backends", "inprocess")) == {"threads": 2}
