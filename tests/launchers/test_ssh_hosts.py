"""The launcher `ssh` as far as it can be seen without sshd: lists of hosts, options, frames, and the far end alone."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import COMMAND, SECONDS, plan

from gpuinfer.config.options import GivenValue, GivenValues
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.launchers import carried_process, remote_end
from gpuinfer.launchers.base import make_launcher
from gpuinfer.launchers.remote_end import BEGIN, FrameReader, RemoteOrder, RemoteState, encode_frame
from gpuinfer.launchers.ssh_hosts import choose_host, read_hosts


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a", [("a", None, 3)]),
        ("a, b ,c.example.com", [("a", None, 3), ("b", None, 3), ("c.example.com", None, 3)]),
        ("me@gpu1:2222 slots=8,gpu2 slots=1", [("me@gpu1", 2222, 8), ("gpu2", None, 1)]),
        ("[::1]:22", [("::1", 22, 3)]),
        ("me@[fe80::1] slots=2", [("me@fe80::1", None, 2)]),
    ],
)
def test_lists_of_hosts_are_read(text, read, tmp_path):
    assert [(one.name, one.port, one.slots) for one in read_hosts(text, 3)] == read
    file = tmp_path / "hosts"
    file.write_text("# ours\n\n" + text.replace(",", "\n") + "  # the last one\n")
    assert [(one.name, one.port, one.slots) for one in read_hosts(f"@{file}", 3)] == read


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no host"),
        (",", "names no host"),
        ("-oProxyCommand=reboot", "is no host"),
        ("a;reboot", "is no host"),
        ("$(reboot)", "is no host"),
        ("a b", "is no host"),
        ("a slots=2 more", "is no host"),
        ("a:0", "is no host"),
        ("a:70000", "is no host"),
        ("a slots=0", "has no slot"),
        ("a,b,a", "names a twice"),
        ("@/no/such/file", "No such file"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text, why):
    with pytest.raises(UsageError, match=why):
        read_hosts(text, 1)


def test_hosts_are_filled_evenly_and_one_that_failed_comes_last():
    hosts = read_hosts("a slots=2,b slots=4,c", 1)
    order = []
    while (chosen := choose_host(hosts)) is not None:
        host, slot = chosen
        host.taken.add(slot)
        order.append(f"{host.name}{slot}")
    assert order == ["a0", "b0", "c0", "b1", "a1", "b2", "b3"]
    hosts[0].taken.clear()
    hosts[1].taken.remove(2)
    hosts[0].failed = 1
    chosen = choose_host(hosts)
    assert chosen is not None
    assert (chosen[0].name, chosen[1]) == ("b", 2)


def options(**given: object) -> dict[str, GivenValue]:
    return {name: GivenValue(value, f"-L {name}") for name, value in given.items()}


def test_options_of_ssh_may_hold_commas_and_be_given_several_times():
    given = GivenValues(["IdentityFile=/k", "Ciphers=a,b"])
    for value in (given, "IdentityFile=/k,Ciphers=a,b"):
        assert make_launcher("ssh", options(hosts="a", options=value)).options.options == [
            "IdentityFile=/k",
            "Ciphers=a,b",
        ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("options", "-v"),
        ("options", "Ciphers"),
        ("options", "A=b\nc"),
        ("python", "-c"),
        ("python", "$(reboot)"),
        ("folder", "a\nb"),
        ("slots", "0"),
        ("gpus", "-1"),
        ("tunnel", "perhaps"),
        ("colour", "red"),
    ],
)
def test_values_that_are_none_are_refused(name, value):
    with pytest.raises(UsageError, match=f"-L {name}"):
        make_launcher("ssh", options(hosts="a", **{name: value}))


def test_hosts_must_be_named():
    with pytest.raises(UsageError, match="launcher 'ssh' needs 'hosts'"):
        make_launcher("ssh", {})


@given(st.lists(st.binary(max_size=40) | st.text(max_size=40)), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(contents, data):
    stream, reader, found = b"".join(map(encode_frame, contents)), FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    types = [type(one) for one in contents]
    assert [msgspec.json.decode(one, type=kind) for one, kind in zip(found, types, strict=True)] == contents


def test_a_frame_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(remote_end, "LARGEST", 100)
    with pytest.raises(WorkError, match="101 bytes are no frame"):
        list(FrameReader().feed(b"x" * 101))


FAR_END = "from gpuinfer.launchers import remote_end; remote_end.SILENCE_S = float('{}'); remote_end.main()"


class FarEnd:
    """The program that sshd would start, with its two streams."""

    def __init__(self, silence_s: float) -> None:
        own = {**os.environ, "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 2"}
        words = [sys.executable, "-c", FAR_END.format(silence_s)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=own)

    def send(self, content: object) -> None:
        self.process.stdin.write(encode_frame(content))
        self.process.stdin.flush()

    def report(self) -> RemoteState:
        return msgspec.json.decode(self.process.stdout.readline(), type=RemoteState)

    def begun(self, folder) -> int:
        """The process id of a sham, once it serves."""
        assert self.process.stdout.readline() == BEGIN
        assert self.report().version
        self.send(RemoteOrder(carried_process.process_order(plan(folder), command=COMMAND)))
        pid = self.report().pid
        assert self.report().address is not None
        return pid


@pytest.fixture
def far_end():
    started = []

    def start(silence_s: float = 600.0) -> FarEnd:
        started.append(FarEnd(silence_s))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(SECONDS)
        one.process.stdin.close()
        one.process.stdout.close()


@pytest.mark.parametrize("way", ["the end of its input", "silence", "SIGTERM"])
def test_the_far_end_leaves_with_its_launcher_and_takes_the_process_along(way, far_end, tmp_path):
    end = far_end(2.0 if way == "silence" else 600.0)
    process = psutil.Process(end.begun(tmp_path))
    if way == "the end of its input":
        end.process.stdin.close()
    elif way == "SIGTERM":
        end.process.terminate()
    assert end.process.wait(SECONDS) == (143 if way == "SIGTERM" else 0)
    process.wait(SECONDS)


def test_the_far_end_asks_the_process_to_leave_and_says_how_it_ended(far_end, tmp_path):
    end = far_end()
    end.begun(tmp_path)
    end.send("alive")
    end.send("terminate")
    assert end.report().code == 0
    assert end.process.wait(SECONDS) == 0
