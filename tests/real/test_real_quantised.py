"""Matrices of a real model rounded to 8 and 4 bits: what that does to its perplexity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

TEXT = Path(__file__).parent / "perplexity.txt"  # 1,587 tokens of documentation, always the same


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_perplexity_is_within_one_percent(weights, folder, gpuinfer, tmp_path):
    report = tmp_path / "report.json"
    words = ("verify", "--model", str(folder), "--perplexity", str(TEXT), "--json", str(report), "--device", "cpu")
    code, out, err = gpuinfer(*words, "-B", f"weights={weights}", "-B", "context=512", "--quiet")
    assert code == 0, out + err
    found = json.loads(report.read_text())["perplexity"]
    assert found["scored"] > 1000
    assert abs(found["change_percent"]) <= 1
