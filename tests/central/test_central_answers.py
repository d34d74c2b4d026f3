"""What comes back through the server is what the model says, for every size, dtype and kind of answer."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from counts import counts, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import FEATURES, tags
from programs import ask_ahead, named, stop
from servers import Program, pid_of, programs, served, serving, until

from gpuinfer.api import ModelSpec
from gpuinfer.models.load import build

pytestmark = pytest.mark.usefixtures("children_forked")

SPREAD = [1, 2, 3, 5, 8, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 511, 512, 777, 1023, 1024, 1025, 2048, 3001, 4096]
SIZES = [pytest.param(SPREAD, id="a spread"), pytest.param(range(1, 4097), id="all", marks=pytest.mark.soak)]


def arrays(answer):
    """The arrays of an answer, whatever they come in."""
    if isinstance(answer, dict):
        return list(answer.values())
    return list(answer) if isinstance(answer, tuple) else [answer]


def direct(model, rows, features=FEATURES):
    """The module's own answer to rows of features."""
    module = build(ModelSpec(model, inputs=features), device=torch.device("cpu"), dtype=torch.float32, seed=0)
    with torch.inference_mode():
        return [part.numpy() for part in arrays(module(torch.as_tensor(rows).float()))]


def assert_close(answer, expected):
    for ours, theirs in zip(arrays(answer), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def normal(seed, rows):
    return np.random.default_rng(seed).standard_normal((rows, FEATURES)).astype(np.float32)


@pytest.fixture(scope="module")
def server():
    with serving("models:network", deterministic=True, max_rows=4096) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_of_every_size_are_answered_as_by_the_model_itself(client, sizes):
    rows, block = normal(1, 4096), client.block(4096)
    expected = direct("models:network", rows)
    block[:] = rows
    for size in sizes:
        wanted = [part[:size] for part in expected]
        assert_close(client.evaluate(rows[:size]), wanted)
        assert_close(client.evaluate(block[:size]), wanted)


def test_requests_that_share_a_batch_are_answered_as_if_each_were_alone(client, server):
    blocks = [normal(seed, rows) for seed, rows in enumerate([1, 700, 2, 33, 64, 9, 512] * 9)]
    before = server.stats()
    stop(pid_of(server))  # so that it finds all of them at once
    try:
        asked = [client.submit(block) for block in blocks]
    finally:
        os.kill(pid_of(server), signal.SIGCONT)
    for pending, block in zip(asked, blocks, strict=True):
        assert_close(pending.result(60), direct("models:network", block))
    until(lambda: server.stats().requests - before.requests == len(blocks), "the count of all requests")
    assert sum(server.stats().batches.values()) - sum(before.batches.values()) < len(blocks)


@settings(deadline=None, max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(0, 2**16))
def test_a_deterministic_server_answers_the_same_bits_whatever_the_company(client, sizes, seed):
    rows, others = normal(7, 40), [normal(seed + number, size) for number, size in enumerate(sizes)]
    alone = client.evaluate(rows)
    asked = [client.submit(other) for other in others]
    mine = client.submit(rows)
    asked += [client.submit(other) for other in others]
    np.testing.assert_array_equal(mine.result(60), alone)
    for pending in asked:
        pending.result(60)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "input_dtype", "features"),
    [
        pytest.param("models:pair", "float32", FEATURES, id="float32"),
        pytest.param("models:network", "uint8", FEATURES, id="uint8"),
        pytest.param("models:pair", "bits", 13, id="bits"),
        pytest.param("models:network", "int8", FEATURES, id="int8", marks=pytest.mark.soak),
        pytest.param("models:network", "bits", 16, id="bits that fill their bytes", marks=pytest.mark.soak),
    ],
)
def test_rows_of_every_dtype_reach_the_model(model, input_dtype, features):
    low, high = {"uint8": (0, 256), "int8": (-128, 128)}.get(input_dtype, (0, 2))
    kind = {"float32": np.float32, "int8": np.int8}.get(input_dtype, np.uint8)
    rows = np.random.default_rng(3).integers(low, high, (300, features)).astype(kind)
    sent = np.packbits(rows, axis=1, bitorder="little") if input_dtype == "bits" else rows
    with serving(model, inputs=features, input_dtype=input_dtype) as server, server.client() as client:
        block = client.block(300)
        assert block.dtype == sent.dtype
        block[:] = sent
        for given in (sent, block):
            assert_close(client.evaluate(given), direct(model, rows, features))


@pytest.mark.parametrize("shape", ["tuple", pytest.param("dict", marks=pytest.mark.thorough)])
def test_an_answer_arrives_as_the_model_arranges_it(shape):
    """The others are asked of models that answer with a tensor."""
    rows = named(3, 4, 50)
    with serving(arguments={"shape": shape}) as server, server.client() as client:
        answer = client.evaluate(rows)
    assert isinstance(answer, tuple) if shape == "tuple" else list(answer) == ["name", "hash"]
    np.testing.assert_array_equal(np.column_stack(arrays(answer)), tags(rows))


@pytest.mark.thorough
@pytest.mark.parametrize("requests", counts(40, 2000))
def test_thirty_two_clients_at_once_each_get_their_own_answers(requests):
    with serving(max_rows=1024) as server:
        with programs(*(Program(ask_ahead, server.client(), who, who, requests, 200) for who in range(32))) as clients:
            heard = [[client.hear(120), client.hear(120)] for client in clients]
        stats = server.stats()
    assert heard == [["here", "right"]] * 32
    assert stats.errors.get("failed", 0) == 0
    assert max(stats.batches) > 200, "no two requests ever shared a batch"


def test_closing_returns_what_the_server_has_counted(capfd):
    server = served("models:Together", chunk_rows=16)
    with server, server.client() as client:
        for size in (16, 32, 64):
            assert (client.evaluate(named(1, size, size)) == 16).all(), "so many go through at once"
    stats = server.close()
    assert (stats.requests, stats.rows, sum(stats.batches.values())) == (3, 112, 3)
    assert sum(stats.reasons.values()) == 3
    assert stats.queue_wait["counts"]
    assert "3 requests, 112 rows in 3 batches" in capfd.readouterr().err
    assert server.stats() == stats
