"""The loss of a training pass: a function from a model's answers and the targets to one number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpuinfer.errors import BackendError, UsageError
from gpuinfer.host import error_text
from gpuinfer.models.load import find_factory, title

POLICY_VALUE = "policy-value"

Loss = Callable[..., Any]
"""(answers, targets, **settings) → a scalar tensor, or that and a dict of its parts by name.

`answers` are what the model answers, tensors in float32 alone, in a tuple or in a dict; `targets` the tensors of the
batch, by name."""


def policy_value(answers: Any, targets: Mapping[str, Tensor], value_weight: float = 1.0) -> tuple[Tensor, Any]:
    """Cross-entropy of the policy against the shares of visits, over the legal moves, plus `value_weight` times the
    mean squared error of the values: the loss of AlphaZero (Silver et al. 2018, "Methods", without its weight decay,
    which is the optimizer's).

    `answers`: policy logits [rows, actions] and values [rows, seats]. `targets`: `policy` [rows, actions], sum 1;
    `value` [rows, seats]; `legal` bool [rows, actions], where the model does not mask its logits by itself.
    """
    logits, values = answers
    if "legal" in targets:
        logits = logits.masked_fill(~targets["legal"].bool(), float("-inf"))
    visits = targets["policy"].float()
    likelihoods = functional.log_softmax(logits, dim=1)
    # where nothing was visited nothing is owed, even where the logarithm is -inf
    policy = -(visits * likelihoods.masked_fill(visits == 0, 0.0)).sum(1).mean()
    value = functional.mse_loss(values, targets["value"].float())
    return policy + value_weight * value, {"policy": policy.detach(), "value": value.detach()}


def find_loss(name: str | None) -> Loss:
    """The function that `module:loss` names; None: `policy_value`. Raises `UsageError`."""
    if name is None or name == POLICY_VALUE:
        return policy_value
    if ":" not in name:
        raise UsageError(f"loss={name} names no function. Write -B loss=module:function, or leave it out.")
    return find_factory(name, what="loss")  # type: ignore[no-any-return]


@functools.lru_cache
def _arguments(loss: Loss) -> frozenset[str] | None:
    """The argument names; None: any. Cached, since `inspect` takes a third of a millisecond."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return frozenset()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def loss_and_parts(
    name: str, loss: Loss, answers: Any, targets: Mapping[str, Tensor], settings: Mapping[str, float]
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """The loss and its parts. Raises `BackendError` for anything that is no loss, or no number.

    Parts on a CUDA device stay there, as float64 tensors [], until `read`: the host would wait for each.
    """
    named = _arguments(loss)
    try:
        found = loss(answers, targets, **{key: one for key, one in settings.items() if named is None or key in named})
    except Exception as error:
        given = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in targets.items())
        raise BackendError(
            f"{title(name, 'loss')} raised {error_text.full_message(error)}. It was given {_shapes(answers)} and the "
            f"targets {given}. Mend it, or name another with -B loss=module:function."
        ) from error
    scalar, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.is_floating_point():
        shape = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        if isinstance(scalar, Tensor):
            shape = f"a tensor {list(scalar.shape)} of {scalar.dtype}"
        raise BackendError(
            f"{title(name, 'loss')} returned {shape}, and not one number. Let it return a scalar tensor, such as the "
            "mean over the rows, or that and a dict of its parts."
        )
    if torch.is_grad_enabled() and not scalar.requires_grad:
        raise BackendError(
            f"{title(name, 'loss')} returned a number that does not depend on the model's parameters. Compute it from "
            "the answers, without detach() or item()."
        )
    try:
        return scalar.reshape(()), {str(key): _number(value) for key, value in parts.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise BackendError(
            f"{title(name, 'loss')} returned, beside the scalar, what are no numbers by name ({error}). Let it return "
            "a dict of numbers there, or the scalar alone."
        ) from error


def read_loss(scalar: Tensor, parts: Mapping[str, float | Tensor]) -> tuple[float, dict[str, float]]:
    """A loss and its parts as numbers, with one wait for the device."""
    if scalar.device.type == "cpu":
        return float(scalar.detach()), {name: float(one) for name, one in parts.items()}
    there = [one for one in parts.values() if isinstance(one, Tensor)]
    value, *numbers = torch.stack([scalar.detach().double(), *there]).cpu().tolist()
    return value, {name: numbers.pop(0) if isinstance(one, Tensor) else one for name, one in parts.items()}


def _number(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return float(value.detach() if isinstance(value, Tensor) else value)
    return value.detach().double().reshape(())


def _shapes(answers: Any) -> str:
    if isinstance(answers, Mapping):
        return "answers " + ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in answers.items())
    parts = answers if isinstance(answers, tuple | list) else [answers]
    return "answers " + " and ".join(str(list(tensor.shape)) for tensor in parts)
