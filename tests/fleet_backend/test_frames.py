"""Prompts and answers in text as they travel."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.errors import BackendError, BadPrompt, Expired, GpuinferError, QueueFull, UnknownName
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Prompt, Sampling
from gpuinfer.text import answer_frames
from gpuinfer.text.answer_frames import Unframer

LOGPROBS = (Logprob(Candidate(5, -0.5, 1), (Candidate(6, -1.5, 2),)),)
PART = Part(sample=0, text="ab", tokens=(5,), logprobs=LOGPROBS)
DONE = Generation(
    completions=(Completion(text="ab", tokens=(5,), finish_reason="length", logprobs=LOGPROBS),), prompt_tokens=3
)


def test_a_prompt_is_read_as_it_was_written():
    prompt = Prompt(text="a", key="7", samples=2, sampling=Sampling(logit_bias={5: 1.0}, stop=("x",), seed=2**40))
    assert answer_frames.prompt_from_body(answer_frames.prompt_to_body(prompt)) == prompt


def test_news_come_out_as_they_went_in_however_the_bytes_arrive():
    news = [PART, PART, DONE]
    data = b"".join(map(answer_frames.to_frame, news))
    for step in (1, 3, 7, len(data)):
        unframer = Unframer()
        found = [one for at in range(0, len(data), step) for one in unframer.feed(data[at : at + step])]
        assert found == news


def test_an_error_keeps_its_kind_and_what_it_says():
    full = QueueFull("no room. Come back.")
    full.retry_after_s = 2.5
    for error in (full, Expired("too late. Ask earlier."), UnknownName("model", "a", ["b"])):
        (found,) = Unframer().feed(answer_frames.to_frame(error))
        assert (type(found), str(found)) == (type(error), str(error))
    (found,) = Unframer().feed(answer_frames.to_frame(full))
    assert found.retry_after_s == 2.5


def test_an_error_of_nobodys_is_a_failure_of_the_backend():
    data = msgspec.msgpack.encode(("error", {"type": "SystemExit", "message": "no"}))
    (found,) = Unframer().feed(struct.pack("<I", len(data)) + data)
    assert type(found) is BackendError


@pytest.mark.parametrize("wrong", [b"", b"\x00", b"\xc1", msgspec.msgpack.encode({"sampling": {"top_k": "a"}})])
def test_what_is_no_prompt_is_refused(wrong):
    with pytest.raises(BadPrompt):
        answer_frames.prompt_from_body(wrong)


def test_a_prompt_that_is_too_large_does_not_travel():
    with pytest.raises(BadPrompt, match="Shorten"):
        answer_frames.prompt_to_body(Prompt(text="a" * (answer_frames.LARGEST_PROMPT + 1)))


@given(st.binary(max_size=100))
def test_no_bytes_do_harm(data):
    for wrong in (data, struct.pack("<I", len(data)) + data):
        with contextlib.suppress(BackendError):
            assert all(isinstance(one, GpuinferError | Part | Generation) for one in Unframer().feed(wrong))
