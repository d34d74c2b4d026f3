"""The router reads heads for itself, to be quick about it: it takes what `http.strict` takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from counts import examples
from damage import damaged
from malformed_requests import CASES

from gpuinfer.fleet.router.http_message import RequestHead
from gpuinfer.http.parser import Malformed, check_head


def taken(read: Callable[[bytes], object], head: bytes) -> bool:
    try:
        read(head)
    except Malformed:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_what_one_refuses_the_other_refuses(name):
    head, end, _ = CASES[name][1].partition(b"\r\n\r\n")
    assert taken(RequestHead, head + end) == taken(check_head, head + end)


def test_they_agree_on_damaged_heads():
    dice = random.Random(7)
    for _ in range(examples(15_000)):
        head, end, _ = damaged(dice).partition(b"\r\n\r\n")
        assert taken(RequestHead, head + end) == taken(check_head, head + end), head
