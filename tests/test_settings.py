"""Flag > environment > file > default; each value knows its origin, and each complaint ends with the cure."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages import install_count
from pydantic import BaseModel, Field, field_validator

from gpuinfer.config import options, registry, settings
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """An empty working folder, no GPUINFER_ variables, and the `count` package installed."""
    for variable in [name for name in os.environ if name.startswith("GPUINFER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(registry.DISABLED, "")
    site = tmp_path / "site"
    site.mkdir()
    install_count(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "gpuinfer.toml") -> Path:
    Path(name).write_text(text)
    return Path(name)


def complaint(**flags: GivenValue) -> str:
    with pytest.raises(UsageError) as caught:
        settings.load(flags)
    return str(caught.value)


def seed_from(layers, monkeypatch) -> settings.Settings:
    flags = {}
    if "file" in layers:
        write("seed = 1")
    if "environment" in layers:
        monkeypatch.setenv("GPUINFER_SEED", "2")
    if "flag" in layers:
        flags["seed"] = GivenValue("3", "--seed")
    return settings.load(flags)


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
def test_the_nearest_layer_wins_and_is_named(layers, seed, origin, monkeypatch):
    merged = seed_from(layers.split(), monkeypatch)
    assert (merged.common.seed, merged.origin("seed")) == (seed, origin)


def test_layers_merge_key_by_key(monkeypatch):
    write('[count]\ngames = 5\norder = "down"\n[backends.parrot]\nmax_rows = "4k"')
    monkeypatch.setenv("GPUINFER_COUNT__GAMES", "6")
    monkeypatch.setenv("GPUINFER_BACKENDS__PARROT__SECONDS", "5ms")
    merged = settings.load()
    count, parrot = registry.load("workloads", "count"), registry.load("backends", "parrot")
    assert merged.options("workloads", "count", count) == {"games": "6", "order": "down"}
    assert merged.options("backends", "parrot", parrot) == {"max_rows": 4000, "seconds": 0.005}
    assert merged.origin("count.order") == "gpuinfer.toml [count] order"


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_another_file_can_be_named(how, monkeypatch):
    write("seed = 9", "other.toml")
    if how == "variable":
        monkeypatch.setenv("GPUINFER_CONFIG", "other.toml")
    assert settings.load(config=Path("other.toml") if how == "flag" else None).common.seed == 9


def test_a_named_file_must_exist():
    with pytest.raises(UsageError, match=r"no settings file absent\.toml\. Give --config a file"):
        settings.load(config=Path("absent.toml"))


PLACES = [
    pytest.param(lambda path: path.mkdir(), "is a folder", id="folder"),
    pytest.param(os.mkfifo, "is a pipe", id="pipe"),
    pytest.param(lambda path: path.symlink_to(path.name), "is a link that leads back to itself", id="circle of links"),
    pytest.param(lambda path: path.symlink_to("gone.toml"), "is a link that leads nowhere", id="link to nothing"),
    pytest.param(lambda path: path.symlink_to("/dev/null"), "is no file", id="device"),
]


@pytest.mark.parametrize(("make", "said"), PLACES)
@pytest.mark.parametrize("named", [None, Path("gpuinfer.toml")], ids=["found", "named"])
def test_what_is_no_file_is_refused_and_not_waited_for(make, said, named):
    make(Path("gpuinfer.toml"))
    with pytest.raises(UsageError, match=f"the settings file gpuinfer.toml {said}. (Put|Give) "):
        settings.load(config=named)


@pytest.mark.parametrize("origin", ["file", "environment"])
def test_disabled_plugins_are_off_once_settings_are_loaded(origin, monkeypatch):
    if origin == "file":
        write('disabled_plugins = ["backends.parrot"]')
    else:
        monkeypatch.setenv("GPUINFER_DISABLED_PLUGINS", "backends.parrot, other")
    settings.load()
    assert "parrot" not in registry.names("backends")


def test_a_table_of_a_plugin_that_is_switched_off_may_stay():
    write('disabled_plugins = ["gpuinfer-count"]\n[backends.parrot]\nseconds = 1\n[count]\ngames = 3')
    assert settings.load().table("count")["games"].value == 3


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        pytest.param("devise = 1", ["gpuinfer.toml devise", "Did you mean 'device'?"], id="unknown key"),
        pytest.param("[coumt]\na = 1", ["Did you mean 'count'?"], id="unknown table"),
        pytest.param("[backends.parot]\na = 1", ["gpuinfer.toml [backends] parot", "'parrot'"], id="unknown backend"),
        pytest.param("count = 3", ["gpuinfer.toml count: 3 is no table"], id="a value where a table belongs"),
        pytest.param("seed = 1\nx =\n", ["gpuinfer.toml", "line 2", "Correct that line."], id="no TOML"),
        pytest.param("seed = 'x'", ["gpuinfer.toml seed: 'x' is not a whole number", "default: 0"], id="ill-typed"),
        pytest.param("seed = -1", ["-1 is less than 0. Give 0 or more."], id="out of range"),
        pytest.param("dtype = 'float31'", ["Did you mean 'float32'? Choose from float32, bfloat16"], id="no choice"),
        pytest.param("device = 'gpu'", ["'gpu' is not of the right form", "cuda:1"], id="wrong form"),
        pytest.param("live = 'maybe'", ["'maybe' is neither true nor false"], id="no truth"),
    ],
)
def test_a_wrong_file_is_explained_with_place_and_cure(toml, said):
    write(toml)
    message = complaint()
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("GPUINFER_DEVISE", "cpu", ["Did you mean 'GPUINFER_DEVICE'?", "unset GPUINFER_DEVISE."]),
        ("GPUINFER_COUMT__GAMES", "1", ["GPUINFER_COUNT__…"]),
        ("GPUINFER_BACKENDS__PAROT__SECONDS", "1", ["no such backend. Did you mean 'parrot'?"]),
        ("GPUINFER_BACKENDS", "parrot", ["GPUINFER_BACKENDS: 'parrot' is no table"]),
        ("GPUINFER_SEED", "many", ["GPUINFER_SEED: 'many' is not a whole number"]),
    ],
)
def test_a_wrong_variable_is_explained_with_its_name_and_cure(variable, value, said, monkeypatch):
    monkeypatch.setenv(variable, value)
    message = complaint()
    assert all(words in message for words in said), message


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


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rows", "4k", 4000),
        ("rows", "64Ki", 65536),
        ("rows", "1.5k", 1500),
        ("rows", "none", None),
        ("rows", "1_000", 1000),
        ("seconds", "5ms", 0.005),
        ("seconds", "2min", 120.0),
        ("seconds", "1e-3", 0.001),
        ("name", "4k", "4k"),
        ("name", "none", "none"),
        ("kind", "none", "none"),
        ("fast", "yes", True),
        ("fast", "off", False),
        ("tags", "a, b", ["a", "b"]),
        ("maybe", "none", None),
        ("where", "none", None),
    ],
)
def test_text_becomes_what_the_field_takes(key, text, value):
    assert getattr(Some(**options.check(Some, {key: GivenValue(text, "-B")}, "it")), key) == value


@given(st.one_of(st.integers(1, 10**12), st.floats(0, 1e9)))
def test_a_number_written_out_is_read_as_itself(number):
    key = "rows" if isinstance(number, int) else "seconds"
    assert getattr(Some(**options.check(Some, {key: GivenValue(str(number), "-B")}, "it")), key) == number


@given(st.text(max_size=12))
def test_any_text_at_all_is_taken_or_is_a_usage_error(text):
    for key in Some.model_fields:
        with contextlib.suppress(UsageError):
            Some(**options.check(Some, {key: GivenValue(text, f"-B {key}")}, "it"))


def test_an_unknown_option_names_the_nearest_even_if_the_model_would_ignore_it():
    with pytest.raises(
        UsageError, match=r"-B rosw: it has no option 'rosw'\. Did you mean 'rows'\? Options: fast, kind"
    ):
        options.check(Some, {"rosw": GivenValue(1, "-B rosw")}, "it")


class Strict(BaseModel):
    needed: int


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "'0' is less than 2. Give 2 or more, or auto."),
        ("some", "'some' is not a whole number. Give a whole number, or auto."),
        ("atuo", "'atuo' is not a whole number. Did you mean 'auto'? Give a whole number, or auto."),
    ],
)
def test_a_number_or_a_word_is_complained_about_once(text, said):
    with pytest.raises(UsageError) as refused:
        options.check(Some, {"stages": GivenValue(text, "-B stages")}, "it")
    assert str(refused.value) == f"-B stages: {said}"


def test_a_missing_option_is_named():
    with pytest.raises(UsageError, match="it needs 'needed'"):
        options.check(Strict, {}, "it")


def test_a_validators_own_words_are_kept():
    class Picky(BaseModel):
        rows: int = 2

        @field_validator("rows")
        @classmethod
        def _even(cls, rows: int) -> int:
            if rows % 2:
                raise ValueError("an odd number of rows cannot be halved. Give an even one")
            return rows

    with pytest.raises(
        UsageError, match=r"^-B rows: '3': an odd number of rows cannot be halved\. Give an even one\.$"
    ):
        options.check(Picky, {"rows": GivenValue("3", "-B rows")}, "it")


def test_no_workload_can_have_the_name_of_a_setting():
    names = {*options.fields_of(settings.Common), *settings.TABLES}
    assert set(registry.SETTINGS) == names


@pytest.mark.parametrize(
    ("given", "devices"),
    [("cuda:0,cuda:1", ("cuda:0", "cuda:1")), ("cpu+cpu", ("cpu", "cpu")), ("all", ("all",)), ("auto", ("auto",))],
)
def test_several_devices_are_named_in_one_setting(given, devices):
    assert settings.load({"device": GivenValue(given, "--device")}).common.devices == devices


@pytest.mark.parametrize("given", ["cuda:0,", "all,cpu", "gpu", "cuda:x", "cpu,,cpu", "auto,auto"])
def test_what_names_no_devices_is_refused(given):
    with pytest.raises(UsageError, match="--device"):
        settings.load({"device": GivenValue(given, "--device")})
