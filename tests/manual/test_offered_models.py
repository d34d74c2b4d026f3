"""The names of models that a shell offers are those of models that there are."""

from __future__ import annotations

from gpuinfer.config import registry
from gpuinfer.config.options import fields_of
from gpuinfer.serving.openai.model_options import TEXT_MODELS


def test_models_of_text_are_those_that_are_built_in():
    from gpuinfer.text.checkpoint.built_in import BUILT_IN

    assert set(TEXT_MODELS) == set(BUILT_IN)


def test_models_of_rows_are_networks_or_answer_without_one():
    from gpuinfer.models.networks import NETWORKS

    for workload, more in (("selfplay", {"uniform", "rollout"}), ("train", set()), ("load", {"none"})):
        field = fields_of(registry.load("workloads", workload).Options)["model"]
        assert set(field.json_schema_extra["names"]) == set(NETWORKS) | more
