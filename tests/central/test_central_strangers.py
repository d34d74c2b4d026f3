"""Whatever anybody sends to a server, it goes on serving the others."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import named, wrong
from servers import mapped, pid_of, serving, serving_held, until
from strangers import Stranger, header

from gpuinfer.central.protocol import VERSION, RecordKind, WireRecord, pack_record
from gpuinfer.host import child
from gpuinfer.host.shared_memory import SEALS

pytestmark = pytest.mark.usefixtures("children_forked")


@pytest.fixture(scope="module")
def server():
    """On a machine that is busy a server may have no core for seconds: only here that is no reason to give it up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "LATE_S", 120.0)
        with serving(max_rows=256) as server:
            yield server


@pytest.fixture(scope="module")
def friend(server):
    """A client that must be served whatever happens beside it."""
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def others_are_served(friend):
    """Before each test, and after it."""
    rows = named(9, 9, 17)
    assert wrong(rows, friend.evaluate(rows)) is None
    yield
    assert wrong(rows, friend.evaluate(rows)) is None


def hello_of(body):
    return pack_record(WireRecord(RecordKind.HELLO, body=body))


GARBAGE = [
    pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4, id="another protocol"),
    pytest.param(bytes(200), id="zeros"),
    pytest.param(b"\xff" * 200, id="ones"),
    pytest.param(pack_record(WireRecord(RecordKind.ASK, rows=1)), id="a request before the greeting"),
    pytest.param(hello_of(None), id="a greeting without a token"),
    pytest.param(hello_of({"token": b"x" * 16, "version": VERSION}), id="a wrong token"),
    pytest.param(hello_of({"token": "text", "version": VERSION}), id="a token that is not bytes"),
    pytest.param(hello_of(["token"]), id="a greeting that is a list"),
    pytest.param(header(RecordKind.HELLO, body=2**32 - 1), id="a body of four gigabytes"),
    pytest.param(header(RecordKind.HELLO, body=3) + b"\xc1\xc1\xc1", id="a body that is not msgpack"),
    pytest.param(header(RecordKind.HELLO, body=60_000) + b"\x91" * 60_000, id="a body that is nested without end"),
    pytest.param(b"", id="nothing", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("data", GARBAGE)
def test_whoever_does_not_greet_as_agreed_is_dropped(server, data):
    with Stranger(server, greet=False) as stranger:
        stranger.raw(data)
        assert stranger.dropped()


def test_another_version_is_told_so(server):
    with Stranger(server, greet=False) as stranger:
        stranger.raw(hello_of({"token": server.address.token, "version": VERSION + 1}))
        assert "different versions" in stranger.next().body["message"]
        assert stranger.dropped()


def grouped(group):
    return pack_record(WireRecord(RecordKind.ASK, rows=1, left_s=math.inf, body={"group": group}))


ASK = RecordKind.ASK
DEEP = header(ASK, rows=1, left_s=math.inf, body=20_008) + b"\x81\xa5group" + b"\x91" * 20_000 + b"\x01"
TWICE = b"".join(header(ASK, rows=1, left_s=math.inf, number=number) for number in (1, 2)) * 200
IMPOSSIBLE = [
    pytest.param(header(ASK, block=7, rows=1), id="a block that was never presented"),
    pytest.param(header(ASK, rows=0), id="a request for no rows"),
    pytest.param(header(ASK, rows=33), id="more rows than the block has room for"),
    pytest.param(header(ASK, rows=2**32 - 1), id="four thousand million rows"),
    pytest.param(header(ASK, rows=1, left_s=math.nan), id="a deadline that is no number"),
    pytest.param(TWICE, id="twice"),
    pytest.param(header(RecordKind.BLOCK, block=1, rows=8), id="a block without memory"),
    pytest.param(header(RecordKind.WELCOME), id="what only a server says"),
    pytest.param(header(77), id="a kind that does not exist"),
    pytest.param(header(RecordKind.HELLO), id="a second greeting"),
    pytest.param(header(ASK, rows=1, body=1 << 30), id="a body of a gigabyte"),
    pytest.param(header(ASK, rows=1, body=2) + b"\xc1\xc1", id="a body that is not msgpack"),
    pytest.param(grouped({"a": 1}), id="a group that cannot be a key"),
    pytest.param(grouped([[{}]]), id="a list that cannot be a key"),
    pytest.param(DEEP, id="a group nested deep"),
]


@pytest.mark.parametrize("data", IMPOSSIBLE)
def test_records_that_make_no_sense_end_that_line_only(server, data):
    with Stranger(server) as stranger:
        stranger.present(0, 32)
        stranger.raw(data)
        assert stranger.dropped()


def file_of(size):
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())


def memfd_of(size, seals):
    descriptor = os.memfd_create("gpuinfer test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


BLOCKS = [
    pytest.param(0, 100, lambda size: memfd_of(size, 0), id="not sealed"),
    pytest.param(0, 100, lambda size: memfd_of(size // 2, SEALS), id="too small"),
    pytest.param(0, 100, lambda size: memfd_of(2 * size, SEALS), id="too large"),
    pytest.param(0, 100, lambda size: memfd_of(size, SEALS & ~2), id="sealed, but not against shrinking"),
    pytest.param(0, 100, lambda size: memfd_of(size, SEALS | 8), id="read-only"),
    pytest.param(0, 100, file_of, id="a file on disk"),
    pytest.param(0, 100, lambda size: os.open("/dev/zero", os.O_RDWR), id="a device"),
    pytest.param(0, 100, lambda size: os.open("/", os.O_RDONLY), id="a folder"),
    pytest.param(0, 0, lambda size: memfd_of(size, SEALS), id="no rows"),
    pytest.param(0, 257, lambda size: memfd_of(size, SEALS), id="more than a batch takes"),
    pytest.param(256, 10, lambda size: memfd_of(size, SEALS), id="a number beyond the last"),
]


@pytest.mark.parametrize(("number", "rows", "make"), BLOCKS)
def test_memory_that_is_not_what_it_should_be_is_refused(server, number, rows, make):
    before = mapped(pid_of(server))
    with Stranger(server) as stranger:
        descriptor = make(stranger.form.size(rows))
        stranger.send(WireRecord(RecordKind.BLOCK, block=number, rows=rows), descriptor)
        os.close(descriptor)
        assert stranger.dropped()
    until(lambda: mapped(pid_of(server)) <= before, "the memory's release")


def test_a_block_takes_the_place_of_another_of_its_number(server):
    with Stranger(server) as stranger:
        before = mapped(pid_of(server))
        for number, rows in enumerate((10, 200, 3)):
            stranger.present(0, rows)
            stranger.ask(number, 0, named(1, number, rows))
            assert stranger.next().number == number
            assert wrong(named(1, number, rows), stranger.blocks[0].answer(rows, copied=True)) is None
        until(lambda: mapped(pid_of(server)) <= before + 1, "the release of the first two")


@pytest.mark.thorough
def test_a_block_that_is_being_served_cannot_be_replaced():
    with serving_held() as (server, hold), Stranger(server) as stranger:
        hold.close()
        stranger.present(0, 10)
        stranger.ask(1, 0, named(1, 1, 10))
        hold.wait_until_reached()
        stranger.present(0, 20)
        assert "impossible size or number" in stranger.next().body["message"]
        assert stranger.dropped()


def test_descriptors_that_nothing_asks_for_are_not_kept(server):
    def held():
        return len(os.listdir(f"/proc/{pid_of(server)}/fd"))

    before = held()
    with Stranger(server) as stranger, open("/dev/null") as null:
        for _ in range(100):
            stranger.raw(header(RecordKind.CANCEL), *[null.fileno()] * 16)
        assert stranger.dropped()
    until(lambda: held() <= before, "the descriptors' closing")


def test_many_strangers_leave_room_for_a_client(server):
    with contextlib.ExitStack() as lines:
        for _ in range(300):
            lines.enter_context(Stranger(server, greet=False))
        with server.client() as client:
            assert wrong(named(8, 8, 3), client.evaluate(named(8, 8, 3))) is None


def test_a_flood_of_requests_whose_answers_nobody_takes_ends_with_its_line(server):
    refused = header(ASK, rows=1, left_s=-1.0) * 1000
    with Stranger(server) as stranger:
        stranger.present(0, 32)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 (one of many sends)
            for _ in range(400):
                stranger.line.sendall(refused)


def test_each_request_is_replied_to_exactly_once_whatever_is_cancelled(server):
    with Stranger(server) as stranger:
        for block in range(8):
            stranger.present(block, 32)
        for number in range(0, 400, 8):
            for offset in range(8):
                left_s = 1e-5 if offset == 3 else math.inf
                stranger.ask(number + offset, offset, named(1, number + offset, 1 + offset), left_s, client=offset)
                for _ in range(2 * (offset % 3 == 1)):
                    stranger.send(WireRecord(RecordKind.CANCEL, number=number + offset))
            replies = [stranger.next() for _ in range(8)]
            assert sorted(reply.number for reply in replies) == list(range(number, number + 8))
            for reply in replies:
                offset = reply.number - number
                if reply.kind == RecordKind.ANSWER:
                    answer = stranger.blocks[offset].answer(1 + offset, copied=True)
                    assert wrong(named(1, reply.number, 1 + offset), answer) is None
        stranger.ask(1000, 0, named(1, 1000, 1))
        assert stranger.next().number == 1000, "no second reply came before"


SMALL = st.integers(0, 40)
RECORDS = st.builds(
    header,
    st.sampled_from([*map(int, RecordKind), int(ASK), int(RecordKind.CANCEL)]),
    block=SMALL,
    number=SMALL,
    rows=SMALL,
    body=st.sampled_from([0, 0, 0, 1, 5]),
    left_s=st.floats(),
)
BODIES = st.builds(
    lambda body: pack_record(WireRecord(ASK, rows=1, number=3, left_s=1.0, body=body)),
    st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))
    | st.dictionaries(
        st.sampled_from(["group", "x"]), st.integers(-(2**63), 2**64 - 1) | st.lists(st.integers(0, 9)), max_size=2
    ),
)


@pytest.mark.parametrize("examples", [pytest.param(60, id="60"), pytest.param(5000, id="5000", marks=pytest.mark.soak)])
def test_random_bytes_after_a_valid_greeting_take_nothing_down(server, friend, examples):
    mixed = st.lists(RECORDS | BODIES | st.binary(max_size=60), max_size=8).map(b"".join)

    @settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300) | mixed)
    def tried(data):
        with Stranger(server) as stranger:
            stranger.present(0, 32)
            stranger.raw(data)
            stranger.line.shutdown(1)
            assert stranger.dropped()
        assert wrong(named(9, 8, 5), friend.evaluate(named(9, 8, 5))) is None

    tried()


def test_nothing_of_all_those_lines_is_left(server):
    """Runs last in this file: the server holds what its one client has, and no more."""
    until(lambda: mapped(pid_of(server)) <= 1 + 4, "the memory's release")
    assert server.stats().waiting == 0
