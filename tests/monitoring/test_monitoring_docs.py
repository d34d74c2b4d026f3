"""docs/monitoring.md and the dashboard name what there is."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from monitoring.exposed import dashboard, everything, expressions, labels_of

BY_PROMETHEUS = {"job", "instance"}  # labels that it adds itself
CALLED = re.compile(r"\b(gpuinfer_\w+)(\{[^}]*\})?")


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_that_is_asked_for_is_there(expression):
    known = labels_of(everything())
    named = CALLED.findall(expression)
    assert named
    for name, selected in named:
        labels = set(re.findall(r"(\w+)=", selected))
        assert labels <= known[name] | BY_PROMETHEUS
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert grouped <= set.union(*(known[name] for name, _ in named)) | BY_PROMETHEUS


def test_legends_name_labels_that_are_left():
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert wanted <= {label.strip() for group in grouped for label in group.split(",")}, panel["title"]


def test_panels_say_what_they_are_and_do_not_overlap():
    panels, taken = dashboard()["panels"], set()
    assert len({panel["id"] for panel in panels}) == len({panel["title"] + panel["type"] for panel in panels})
    for panel in panels:
        assert panel["description"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.system
def test_prometheus_understands_every_expression(tmp_path):
    rules = [
        {"record": f"tried:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "tried", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout
