"""What an exposition can have in it, and what the docs and the dashboard ask of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monitoring.synthetic import Server, worker
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpuinfer.serving.monitoring.live_page import asset
from gpuinfer.serving.monitoring.metrics import (
    exposition,
    models_up_family,
    router_families,
    served_models_family,
    snapshot_families,
    worker_families,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "monitoring.md"


def everything() -> Sequence[Metric]:
    """All families, of a fleet of text that has counted everything."""
    more = [
        served_models_family(["tiny"]),
        models_up_family({"tiny": True}),
        *worker_families([worker(0), worker(1)]),
        *router_families({"connections": 3, "requests": 7}),
    ]
    text = exposition([*snapshot_families(Server().step()), *more])
    return list(text_string_to_metric_families(text.decode()))


def labels_of(families: Sequence[Metric]) -> Mapping[str, set[str]]:
    """Name of a sample → the names of its labels."""
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def name_of(family: Metric) -> str:
    """As it stands after # TYPE."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def dashboard() -> dict[str, Any]:
    found = asset("/dashboard.json")
    assert found is not None
    told: dict[str, Any] = json.loads(found[0])
    return told


def expressions() -> list[str]:
    """All PromQL of both."""
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    in_docs = re.findall(r"^\| [^|]+ \| `(.*)` \|$", PAGE.read_text(), re.M)
    return [*asked, *(text.replace(r"\|", "|") for text in in_docs if "gpuinfer_" in text and " " in text)]
