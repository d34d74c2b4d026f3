"""A model whose device writes answers into clients' blocks and says where it found faults; and a client that comes back
while a batch still uses its blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import select
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from models import BAD, FEATURES, Faulty, tags
from programs import named, wrong
from servers import serving_held
from strangers import Stranger

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.central.blocks import Block, BlockForm
from gpuinfer.central.row_server import BatchRunner
from gpuinfer.engine.results import find_fault
from gpuinfer.errors import BadResult
from gpuinfer.models.open_model import open_model

ROWS = (3, 1, 7, 5)


@pytest.fixture(scope="module", params=["tensor", "dict"])
def opened(request):
    spec = ModelSpec("models:faulty", inputs=FEATURES, arguments={"shape": request.param})
    tuning = SimpleNamespace(
        max_rows=64, in_flight=1, chunk_rows=None, threads=1, compile=False, graphs=True, compute="auto"
    )
    return open_model(spec, Setup(model=spec, devices=("cpu",)), tuning)


def writing(opened):
    """As if a device answered: it alone looks for faults."""

    def write(blocks, targets):
        results = opened.forward(blocks)
        for result, parts in zip(results, targets, strict=True):
            for target, part in zip(parts, arrays(result), strict=True):
                target[:] = part
        return [find_fault(result, len(block)) is None for result, block in zip(results, blocks, strict=True)]

    return replace(opened, forward=lambda blocks: pytest.fail("answers go through the host"), write=write)


def arrays(result):
    parts = list(result.values()) if isinstance(result, dict) else result
    return list(parts) if isinstance(parts, tuple | list) else [parts]


def batch_of(opened, odd=None, how=None, value=BAD):
    """Requests of several clients, of which number `odd` has a row that the model fails at in this way."""
    form, batch = BlockForm(opened.spec, opened.answer), []
    for number, rows in enumerate(ROWS):
        block = Block(0, 16, mmap.mmap(-1, form.size(16)), form)
        block.rows[:rows] = named(1, number, rows)
        if number == odd:
            block.rows[rows - 1, -2:] = how, value
        batch.append(SimpleNamespace(block=block, rows=rows))
    return batch


FAULTS = {
    "NaN in one answer": (Faulty.ANSWERS_NAN, BAD, "the model answered badly: the result", False),
    "rows that hold NaN": (0, np.nan, "the rows hold NaN, and so does the answer", False),
    "a row at which the model raises": (Faulty.RAISES, BAD, "this row cannot be answered", True),
}


@pytest.mark.parametrize(("how", "value", "words", "raises"), FAULTS.values(), ids=FAULTS)
def test_one_clients_fault_is_its_own_in_the_words_of_one_that_the_host_finds(opened, how, value, words, raises):
    outcomes = []
    for model in (opened, writing(opened)):
        batch = batch_of(opened, 2, how, value)
        served = BatchRunner(model).answer(batch)
        outcomes.append(([repr(error) for error in served.errors], served.again, served.whole))
        for number in (0, 1, 3):
            parts = arrays(batch[number].block.answer(ROWS[number], True))
            found = np.concatenate([part.reshape(ROWS[number], -1) for part in parts], axis=1)
            np.testing.assert_array_equal(found, tags(named(1, number, ROWS[number])))
    assert outcomes[0] == outcomes[1]
    assert [error is None for error in served.errors] == [True, True, False, True]
    assert (words in str(served.errors[2]), served.again) == (True, raises)


def test_the_host_reads_only_answers_in_which_the_device_finds_something_and_has_the_last_word(opened, monkeypatch):
    model = replace(opened, write=lambda blocks, targets: [False] * len(blocks))
    batch = batch_of(opened)
    for part in batch[1].block.answers:
        part[0] = np.inf
    errors = BatchRunner(model).answer(batch).errors
    assert [type(error) for error in errors] == [type(None), BadResult, type(None), type(None)]
    monkeypatch.setattr("gpuinfer.central.row_server.find_fault", lambda *given: pytest.fail("was read"))
    assert BatchRunner(writing(opened)).answer(batch_of(opened)) == ([None] * 4, False, True)


@contextlib.contextmanager
def left_in_a_batch():
    """A server, what holds its batch, and a client that has hung up while its request is in there."""
    with serving_held(in_flight=2) as (server, hold):
        hold.close()
        before = Stranger(server, client=b"the same")
        before.present(0, 10)
        before.ask(1, 0, named(1, 1, 10))
        hold.wait_until_reached()
        before.line.close()
        yield server, hold, before


@pytest.mark.usefixtures("children_forked")
def test_a_client_that_comes_back_is_let_in_once_no_batch_has_its_blocks():
    """It took the server for dead: what its old line's batch writes must not land in answers to the new line."""
    with left_in_a_batch() as (server, hold, _):
        after = Stranger(server, greet=False, client=b"the same")
        with after, Stranger(server), Stranger(server):  # by then its greeting has been read
            assert not select.select([after.line], [], [], 0)[0]
            hold.open()
            after.welcomed()
            after.present(0, 10)
            after.ask(1, 0, named(1, 2, 10))
            assert after.next().number == 1
            assert wrong(named(1, 2, 10), after.blocks[0].answer(10, copied=True)) is None


@pytest.mark.usefixtures("children_forked")
def test_a_client_that_is_not_let_in_yet_may_leave_and_must_not_ask():
    with left_in_a_batch() as (server, hold, before):
        with Stranger(server, greet=False, client=b"the same"):
            pass
        with Stranger(server, greet=False, client=b"the same") as asking:
            asking.form = before.form
            asking.present(0, 10)
            assert "before the greeting was answered" in asking.next().body["message"]
            assert asking.dropped()
        hold.open()
        with Stranger(server, client=b"the same") as again:
            again.present(0, 10)
            again.ask(1, 0, named(1, 3, 10))
            assert again.next().number == 1
