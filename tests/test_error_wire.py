"""Errors between processes: of our own types, each comes back as what it was; a special one as the nearest of ours."""

import pytest

from gpuinfer import errors
from gpuinfer.errors import BadPrompt, GpuinferError
from gpuinfer.host.error_text import nearest_error_type, rebuilt_error


class Own(BadPrompt):
    """One that another process does not know."""


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GpuinferError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_comes_back_as_it_was(kind):
    name = nearest_error_type(kind.__new__(kind))
    assert name == kind.__name__
    error = rebuilt_error(name, "too long. Cut it.")
    assert type(error) is kind
    assert str(error) == "too long. Cut it."


def test_a_special_one_comes_back_as_the_nearest_of_ours():
    assert nearest_error_type(Own("too long. Cut it.")) == "BadPrompt"


def test_what_is_none_of_ours_has_no_name():
    assert nearest_error_type(ValueError("odd")) is None
    assert rebuilt_error("ValueError", "odd") is None
    assert rebuilt_error("unwrap", "odd") is None
