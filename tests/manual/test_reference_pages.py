"""docs/reference is as the code is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rich.text import Text

from gpuinfer.cli.plugins import PREFIXES
from gpuinfer.config import options, registry

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def written():
    """Written now, in this process: that others' plugins are switched off for it ends with it."""
    sys.path.insert(0, str(ROOT))  # for tools/, which is no part of the package
    before = os.environ.get(registry.DISABLED)
    try:
        from tools import reference

        return reference.pages()
    finally:
        sys.path.remove(str(ROOT))
        registry.switch_off([before] if before else [])


def test_no_help_loses_words_in_brackets_to_markup(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv(registry.DISABLED, "")  # put back at the end
    from tools import tree

    helps, text = [], tree._text
    monkeypatch.setattr(tree, "_text", lambda help: helps.append(help) or text(help))
    tree.commands()
    assert any("gpuinfer\\[onnx]" in help for help in helps)
    assert [help for help in helps if Text.from_markup(help).plain != help.replace("\\[", "[")] == []


@pytest.mark.parametrize("name", ["commands.md", "contract.md", "metrics.md", "plugins.md", "report.md"])
def test_a_page_is_as_the_code_is(written, name):
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert kept == written[name], f"docs/reference/{name} is not as the code is: run `make reference`"


def test_there_is_no_other_page(written):
    assert {file.name for file in FOLDER.iterdir()} == set(written)


def test_every_option_of_every_plugin_of_ours_is_there(written):
    for kind in ("backends", "strategies", "decoders", "routing"):
        for record in registry.listing(kind):
            if record.distribution == "gpuinfer":
                fields = options.fields_of(registry.load(kind, record.name).Options)
                section = written["plugins.md"].partition(f"### {registry.KINDS[kind]} {record.name}\n")[2]
                section = section.partition("\n### ")[0]
                assert [key for key in fields if f"`{PREFIXES[kind].format(key)}`" not in section] == []


def test_every_command_is_there_with_its_own_flags(written):
    page = written["commands.md"]
    for name in (*registry.COMMANDS, "selfplay", "generate", "rollouts export", "bench serve", "fleet status"):
        assert f"\n## gpuinfer {name}\n" in page
    assert "`--determinizations N`" in page
    assert "| `--dtype NAME` | Number format of the model: float32, bfloat16 or float16. | `float32` |" in page


def test_the_models_that_a_shell_offers_are_there():
    from gpuinfer.models.networks import NETWORKS
    from gpuinfer.serving.openai.model_options import TEXT_MODELS
    from gpuinfer.text.checkpoint.built_in import BUILT_IN
    from gpuinfer.text.packaged_models import PACKAGED

    assert set(TEXT_MODELS) == {*BUILT_IN, *PACKAGED}
    for workload, more in (("selfplay", {"uniform", "rollout"}), ("train", set()), ("load", {"none"})):
        field = options.fields_of(registry.load("workloads", workload).Options)["model"]
        assert set(field.json_schema_extra["names"]) == set(NETWORKS) | more
