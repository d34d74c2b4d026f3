"""`gpuinfer.Models`: several models on one device."""

from __future__ import annotations

import pytest
import torch

import gpuinfer
from gpuinfer.errors import UnknownName, UsageError


def double(rows):
    return rows * 2


def negated(rows):
    return {"value": -rows}


def test_each_model_answers_its_own_rows_of_its_own_shape():
    with gpuinfer.Models(policy=double, value=negated, share={"policy": 3}) as models:
        found = models.predict_many([("policy", torch.ones(4)), ("value", torch.tensor(2.0))] * 20)
        assert [one.tolist() if isinstance(one, torch.Tensor) else one for one in found[:2]] == [
            [2.0] * 4,
            {"value": torch.tensor(-2.0)},
        ]
        assert float(models.predict("value", torch.tensor(3.0))["value"]) == -3.0
        assert models.submit("policy", torch.zeros(4)).result(60).tolist() == [0.0] * 4
        assert sorted(models) == ["policy", "value"]
        assert models.stats()["policy"]["throughput"]
        turns = {
            name: report["device"]["turns"] for name, report in models.report().items() if "turns" in report["device"]
        }
    assert all(turns.values())


async def test_models_are_awaited_from_any_loop():
    with gpuinfer.Models({"a model": double}, options={"devices": "cpu", "a model": {"max_rows": 8}}) as models:
        found = await models.many([("a model", torch.tensor(float(n))) for n in range(30)])
        assert [float(one) for one in found] == [2.0 * n for n in range(30)]
        assert float(await models("a model", torch.tensor(4.0), priority="low")) == 8.0
        assert models["a model"].stats()["batches"]["rows_max"] <= 8
    async with gpuinfer.Models(double=double, negated=negated) as models:
        found = await models.many({"double": torch.tensor(1.0), "negated": torch.tensor(1.0)})
        assert [float(found[0]), float(found[1]["value"])] == [2.0, -1.0]
        assert "double" in repr(models)


@pytest.mark.parametrize(
    ("use", "error", "cure"),
    [
        (lambda: gpuinfer.Models(), UsageError, "a model at least"),
        (lambda: gpuinfer.Models([double, double]), UsageError, "Name them"),
        (lambda: gpuinfer.Models(a=double).predict_many([torch.ones(2)]), UsageError, "pairs of a model's name and"),
        (lambda: gpuinfer.Models(a=double, share={"b": 2}), UnknownName, "Models: a"),
        (lambda: gpuinfer.Models(a=double, share={"a": -1}), UsageError, "above 0"),
        (lambda: gpuinfer.Models(policy=double).predict("polcy", 1.0), UnknownName, "Did you mean 'policy'"),
        (
            lambda: gpuinfer.Models(a=double, options={"devices": "cpu", "max_rowz": 3}).predict("a", 1.0),
            UsageError,
            "max_rows",
        ),
    ],
)
def test_bad_use_is_refused_with_the_cure(use, error, cure):
    with pytest.raises(error, match=cure):
        use()
