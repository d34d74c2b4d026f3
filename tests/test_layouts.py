"""How rows and answers lie in memory: what a client and a server must agree on."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BackendError, UnknownName
from gpuinfer.models.row_format import AnswerLayout, misfit, row_dtype, row_shape


def spec(input_dtype="uint8", inputs=13):
    return ModelSpec("mine", inputs=inputs, input_dtype=input_dtype)


# Rows


@pytest.mark.parametrize(
    ("input_dtype", "inputs", "shape", "dtype"),
    [
        ("uint8", 13, (13,), np.uint8),
        ("int8", 13, (13,), np.int8),
        ("float32", 13, (13,), np.float32),
        *(("bits", inputs, shape, np.uint8) for inputs, shape in ((13, (2,)), (16, (2,)), (17, (3,)))),
    ],
)
def test_how_rows_travel(input_dtype, inputs, shape, dtype):
    assert row_shape(spec(input_dtype, inputs)) == shape
    assert row_dtype(spec(input_dtype, inputs)) == dtype


def test_an_input_dtype_that_nobody_serves_is_refused_with_the_choices():
    with pytest.raises(UnknownName, match=r"'bit'.* Did you mean 'bits'.*float32"):
        row_dtype(spec("bit"))


@pytest.mark.parametrize(
    ("payload", "rows", "said"),
    [
        (np.zeros((2, 13), np.uint8), 2, r"13 features packed as bits.*got uint8 \[2, 13\]"),
        (np.zeros((2, 3), np.uint8), 2, r"got uint8 \[2, 3\]"),
        (np.zeros((2, 1), np.uint8), 2, r"got uint8 \[2, 1\]"),
        (np.zeros((2, 2), bool), 2, r"got bool \[2, 2\]"),
        (np.zeros((2, 2), np.uint8), 3, "request of 3 rows"),
        (np.zeros((0, 2), np.uint8), 0, "request of 0 rows asks for nothing"),
        ([[1, 2]], 0, r"uint8 \[rows, 2\].*got list"),
        (b"ab", 1, "got bytes"),
    ],
)
def test_rows_of_bits_that_do_not_fit_are_told_what_would(payload, rows, said):
    error = misfit(payload, rows, spec("bits"))
    assert isinstance(error, BackendError)
    with pytest.raises(BackendError, match=said):
        raise error


# Answers

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4).map(tuple)
NAMES = st.lists(st.text(max_size=5), min_size=4, max_size=4, unique=True)


@st.composite
def layouts(draw):
    kind, shapes = draw(st.sampled_from(["tensor", "tuple", "dict"])), draw(SHAPES)
    if kind == "tensor":
        return AnswerLayout(kind, shapes[:1])
    return AnswerLayout(kind, shapes, tuple(draw(NAMES)[: len(shapes)]) if kind == "dict" else ())


@given(layouts())
def test_a_layout_survives_the_wire(layout):
    assert AnswerLayout.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(layout.to_wire()))) == layout


@pytest.mark.parametrize(
    ("layout", "arranged"),
    [
        pytest.param(AnswerLayout("tensor", ((),)), "first", id="a tensor"),
        pytest.param(AnswerLayout("tuple", ((),)), ("first",), id="a tuple of one"),
        pytest.param(AnswerLayout("tuple", ((), ())), ("first", "second"), id="a tuple"),
        pytest.param(AnswerLayout("dict", ((), ()), ("a", "b")), {"a": "first", "b": "second"}, id="a dict"),
    ],
)
def test_arrays_are_arranged_as_the_model_would_answer(layout, arranged):
    assert layout.arrange(["first", "second"][: len(layout.shapes)]) == arranged


GOOD = {"kind": "dict", "names": ["a", "b"], "shapes": [[3], []], "dtypes": ["int64", "float32"]}


NO_LAYOUTS = [
    None,
    [],
    *({**GOOD, "kind": kind} for kind in ("list", ["dict"], "tuple")),
    {**GOOD, "kind": "tensor", "names": []},
    *({**GOOD, "names": names} for names in (["a"], ["a", "a"], ["a", 2], "ab")),
    *({**GOOD, "shapes": shapes} for shapes in ([], [[3], 3], [[3], [-1]], [[3], [True]])),
    *({**GOOD, "dtypes": dtypes} for dtypes in (["int64"], ["int64", "object"], ["int64", 3], None, "bool")),
    {"kind": "dict", "names": ["a", "b"]},
]


@pytest.mark.parametrize("wire", NO_LAYOUTS, ids=str)
def test_anything_else_on_the_wire_is_refused(wire):
    assert AnswerLayout.from_wire(GOOD)
    with pytest.raises(BackendError, match="same version"):
        AnswerLayout.from_wire(wire)


def test_a_client_that_knows_the_layouts_has_not_imported_torch():
    code = "import sys, gpuinfer.models.row_format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
