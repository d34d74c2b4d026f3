"""Rows, prompts and answers as they travel: safetensors and frames."""

from __future__ import annotations

import contextlib
import json
import struct

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.errors import BackendError, BadPrompt, Expired, GpuinferError, QueueFull, UnknownName
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Prompt, Sampling
from gpuinfer.models import row_format
from gpuinfer.models.row_format import NotTensors
from gpuinfer.text import answer_frames
from gpuinfer.text.answer_frames import Unframer

ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)


def body(header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8", "float16", "int64"])
def test_rows_are_read_as_they_were_written_by_us_and_by_the_library(dtype):
    rows = ROWS.astype(dtype)
    for written in (row_format.rows_to_body(rows), safetensors.numpy.save({"anything": rows})):
        read = row_format.rows_from_body(written)
        assert read.dtype == rows.dtype
        np.testing.assert_array_equal(read, rows)
    np.testing.assert_array_equal(safetensors.numpy.load(row_format.rows_to_body(rows))["rows"], rows)


def test_an_answer_comes_back_in_its_form_and_what_is_no_array_does_not_travel():
    for answer in (ROWS, (ROWS, ROWS[:, :1]), (ROWS,), {"value": ROWS[:, 0], "policy": ROWS}):
        read = row_format.answer_from_body(row_format.answer_to_body(answer))
        assert type(read) is type(answer)
        if isinstance(answer, dict):
            assert read.keys() == answer.keys()
            read, answer = tuple(read[name] for name in answer), tuple(answer.values())
        for one, other in zip(np.atleast_2d(read) if isinstance(read, np.ndarray) else read, answer, strict=True):
            np.testing.assert_array_equal(one, other)
    written = safetensors.numpy.save({"1": ROWS[:2].astype(np.float64), "0": ROWS}, {"answer": "tuple"})
    assert [one.shape for one in row_format.answer_from_body(written)] == [(4, 6), (2, 6)], "in a tuple's order"
    for write, wrong in ((row_format.answer_to_body, [1, 2, 3]), (row_format.rows_to_body, np.array(["a"]))):
        with pytest.raises(NotTensors, match="does not travel"):
            write(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(struct.pack("<Q", 1 << 62) + b"{}", id="a header longer than all"),
        pytest.param(body(b"{" + b" " * (70 << 10) + b"}"), id="a header that is too long"),
        pytest.param(body(b"[]"), id="a header that is a list"),
        pytest.param(body(b"\xff\xfe"), id="a header that is no text"),
        pytest.param(body(b"[" * 60_000), id="a header that nests"),
        pytest.param(body({"a": tensor(dtype="Q8")}, bytes(8)), id="a dtype that nobody knows"),
        pytest.param(body({"a": tensor(shape=(3,))}, bytes(8)), id="a shape that is larger than its bytes"),
        pytest.param(body({"a": tensor(shape=(-1, -2))}, bytes(8)), id="a negative shape"),
        pytest.param(body({"a": tensor(shape=(1 << 40, 1 << 40), offsets=(0, 8))}, bytes(8)), id="a huge shape"),
        pytest.param(body({"a": tensor(shape=(1,) * 9, offsets=(0, 4))}, bytes(4)), id="too many dimensions"),
        pytest.param(body({"a": tensor(offsets=(8, 0))}, bytes(8)), id="offsets the wrong way round"),
        pytest.param(body({"a": tensor(offsets=(4, 12))}, bytes(12)), id="a gap"),
        pytest.param(body({"a": tensor()}, bytes(12)), id="bytes that belong to nobody"),
        pytest.param(body({"a": tensor()}, bytes(4)), id="too few bytes"),
        pytest.param(body({"a": tensor(), "b": tensor()}, bytes(8)), id="two tensors in one place"),
        pytest.param(body({"a": {**tensor(), "more": 1}}, bytes(8)), id="an unknown field"),
        pytest.param(body({"__metadata__": {"a": 1}, "a": tensor()}, bytes(8)), id="metadata that is no text"),
        pytest.param(body({str(n): tensor(shape=(0,), offsets=(0, 0)) for n in range(300)}), id="too many tensors"),
        pytest.param(body({}), id="no tensor"),
        pytest.param(body({"a": tensor(shape=(), offsets=(0, 4))}, bytes(4)), id="a single number"),
    ],
)
def test_a_wrong_body_is_refused(wrong):
    with pytest.raises(NotTensors):
        row_format.rows_from_body(wrong)


@given(st.binary(max_size=200))
def test_no_bytes_of_rows_do_harm(data):
    for wrong in (data, body(data), body({"a": tensor()}, data)):
        with contextlib.suppress(NotTensors):
            row_format.answer_from_body(wrong)


LOGPROBS = (Logprob(Candidate(5, -0.5, 1), (Candidate(6, -1.5, 2),)),)
PART = Part(sample=0, text="ab", tokens=(5,), logprobs=LOGPROBS)
DONE = Generation(
    completions=(Completion(text="ab", tokens=(5,), finish_reason="length", logprobs=LOGPROBS),), prompt_tokens=3
)


def test_news_come_out_as_they_went_in_however_the_bytes_arrive():
    news = [PART, PART, DONE]
    data = b"".join(map(answer_frames.to_frame, news))
    for step in (1, 3, 7, len(data)):
        unframer = Unframer()
        found = [one for at in range(0, len(data), step) for one in unframer.feed(data[at : at + step])]
        assert found == news


def test_an_error_keeps_its_kind_and_what_it_says_and_one_of_nobodys_is_a_failure_of_the_backend():
    full = QueueFull("no room. Come back.")
    full.retry_after_s = 2.5
    for error in (full, Expired("too late. Ask earlier."), UnknownName("model", "a", ["b"])):
        (found,) = Unframer().feed(answer_frames.to_frame(error))
        assert (type(found), str(found)) == (type(error), str(error))
        assert error is not full or found.retry_after_s == 2.5
    data = msgspec.msgpack.encode(("error", {"type": "SystemExit", "message": "no"}))
    (found,) = Unframer().feed(struct.pack("<I", len(data)) + data)
    assert type(found) is BackendError


def test_a_prompt_is_read_as_it_was_written_and_what_is_none_or_too_large_is_refused():
    prompt = Prompt(text="a", key="7", samples=2, sampling=Sampling(logit_bias={5: 1.0}, stop=("x",), seed=2**40))
    assert answer_frames.prompt_from_body(answer_frames.prompt_to_body(prompt)) == prompt
    for wrong in (b"", b"\x00", b"\xc1", msgspec.msgpack.encode({"sampling": {"top_k": "a"}})):
        with pytest.raises(BadPrompt):
            answer_frames.prompt_from_body(wrong)
    with pytest.raises(BadPrompt, match="Shorten"):
        answer_frames.prompt_to_body(Prompt(text="a" * (answer_frames.LARGEST_PROMPT + 1)))


@given(st.binary(max_size=100))
def test_no_bytes_of_frames_do_harm(data):
    for wrong in (data, struct.pack("<I", len(data)) + data):
        with contextlib.suppress(BackendError):
            assert all(isinstance(one, GpuinferError | Part | Generation) for one in Unframer().feed(wrong))
