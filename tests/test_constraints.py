"""constraints.txt fits what pyproject.toml allows, and says nothing of where it was made."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.constraints import EXTRAS, FILE, without_builds

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
NOT_INSTALLED = ("modal",)  # an example's library, whose tests have a stub of it


def pinned() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in FILE.read_text().splitlines():
        if line and line[0].isalnum():
            requirement = Requirement(line.removesuffix("\\"))
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def asked() -> list[Requirement]:
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    told = [tomllib.loads(path.read_text())["project"] for path in files]
    texts = [text for project in told for text in project["dependencies"]]
    texts = [text for text in texts if Requirement(text).name not in NOT_INSTALLED]
    optional, waiting = told[0]["optional-dependencies"], list(EXTRAS)
    while waiting:
        found = list(map(Requirement, optional[waiting.pop()]))
        texts += map(str, found)
        waiting += [extra for one in found if one.name == "gpuinfer" for extra in one.extras]
    return [one for one in map(Requirement, texts) if one.name not in ("gpuinfer", "torch")]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_requirement_has_one_version_in_its_range(python):
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    there, wanted = pinned(), asked()
    assert len(wanted) > 30
    for requirement in wanted:
        versions = [
            one
            for one in there.get(canonicalize_name(requirement.name), [])
            if one.marker is None or one.marker.evaluate(here)
        ]
        assert len(versions) == 1, f"{requirement.name}: make constraints"
        [exact] = versions[0].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{requirement}: make constraints"


def test_each_has_hashes_and_none_a_place():
    text = FILE.read_text()
    blocks = re.split(r"\n(?=\w)", text)[1:]
    assert len(blocks) == sum(map(len, pinned().values()))
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search(r"://|--index|--find|file:| @ ", text)


def test_what_depends_on_the_build_of_torch_is_left_to_the_machine():
    torch = "torch==2 ; x \\\n    --hash=sha256:bb\n    --hash=sha256:cc\nnvidia-cublas==1\n"
    compiled = f"a==1 \\\n    --hash=sha256:aa\n{torch}b==2\n"
    assert without_builds(compiled) == "a==1 \\\n    --hash=sha256:aa\nb==2\n"
    assert not {"torch", "triton"} & set(pinned())
    assert "nvidia-ml-py" in pinned()
