"""Files are left out at collection where, and only where, they can hold no test that is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import marked
import pytest

ROOT = Path(__file__).parent.parent
PLAIN = "def test_one(): ...\n"
ONE = "@pytest.mark.thorough\ndef test_one(): ...\n"
SAMPLE = "@pytest.mark.sample\ndef test_one(): ...\n"
WHOLE = "import pytest\n\npytestmark = [pytest.mark.system, pytest.mark.timeout(900)]\n" + ONE
ORDINARY = "not thorough and not soak and not system"


@pytest.mark.parametrize(
    ("text", "expression", "held"),
    [
        pytest.param(PLAIN, "", True, id="all are asked for"),
        pytest.param(PLAIN, "thorough and not soak", False, id="none of the kind"),
        pytest.param(PLAIN, ORDINARY, True, id="an ordinary one"),
        pytest.param(ONE, "thorough and not soak", True, id="one of the kind"),
        pytest.param(ONE, ORDINARY, True, id="others may stand beside it"),
        pytest.param(SAMPLE, "thorough", True, id="cases that a sample leaves"),
        pytest.param(WHOLE, ORDINARY, False, id="a file of another kind"),
        pytest.param(WHOLE, "system and not soak", True, id="a file of the kind"),
        pytest.param(WHOLE, "thorough or docs", True, id="either of two"),
        pytest.param(PLAIN, "vllm or docs", False, id="neither of two"),
        pytest.param(PLAIN, "property", True, id="a marker that is given otherwise"),
        pytest.param(PLAIN, "timeout(900) and thorough", False, id="a marker with arguments"),
        pytest.param(PLAIN, "a-b:c and", True, id="what only pytest understands"),
    ],
)
def test_a_file_is_left_out_only_if_it_can_hold_none(tmp_path, text, expression, held):
    file = tmp_path / "test_some.py"
    file.write_text(text)
    assert marked.may_hold(file, expression) is held


def test_markers_of_helpers_are_those_of_whoever_names_them(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text("from decoders import each_decoder\n")  # which marks one of its cases
    assert "thorough" in marked.markers_of(file).some


@pytest.mark.parametrize(
    ("text", "names", "surprised"),
    [
        pytest.param(PLAIN, {"parametrize"}, False, id="none"),
        pytest.param(PLAIN, {"thorough"}, True, id="one that stands nowhere"),
        pytest.param(ONE, {"thorough"}, False, id="one that it names"),
        pytest.param(WHOLE, {"thorough"}, True, id="without that of the whole file"),
        pytest.param(WHOLE, {"system", "timeout"}, False, id="with that of the whole file"),
    ],
)
def test_a_test_that_the_text_does_not_tell_of_is_found(tmp_path, text, names, surprised):
    file = tmp_path / "test_some.py"
    file.write_text(text)
    assert marked.is_surprised_by(file, names) is surprised


def test_each_marker_that_decides_where_a_test_runs_is_known():
    expressions = re.findall(r'-m "(.*?)"', (ROOT / "Makefile").read_text())
    asked = {name for expression in expressions for name in re.findall(r"\w+", expression)} - {"and", "not"}
    assert asked <= marked.DECISIVE
    assert {"thorough", "soak", "gpu"} <= asked
