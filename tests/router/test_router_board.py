"""The counters that router processes share."""

from __future__ import annotations

import os
import stat

from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell, SharedCounters


def open_files() -> dict[int, str]:
    """Number → what it is of this process's descriptors, but for the one that lists them."""
    listed = {one: f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")}
    return {int(one): os.readlink(path) for one, path in listed.items() if os.path.lexists(path)}


def test_their_memory_has_no_name_and_is_for_its_owner_alone():
    before = open_files()
    board = SharedCounters(2)
    new = {number: name for number, name in open_files().items() if number not in before}
    assert new
    assert all(name.startswith("/memfd:gpuinfer-router") for name in new.values())
    assert {stat.S_IMODE(os.fstat(number).st_mode) for number in new} == {0o600}
    del board
    assert open_files().keys() == before.keys()


def test_what_a_dead_process_has_counted_stays_and_what_it_had_under_way_is_gone():
    board = SharedCounters(2)
    for row in range(2):
        board.cells[board.total_at(row, ProcessCell.REQUESTS)] = 5
        board.cells[board.total_at(row, ProcessCell.CONNECTIONS)] = 3
        board.cells[board.member_at(row, 7) + MemberCell.REQUESTS] = 4
        board.cells[board.member_at(row, 7) + MemberCell.IN_FLIGHT] = 2
    board.bury(0)
    assert (board.total(ProcessCell.REQUESTS), board.total(ProcessCell.CONNECTIONS)) == (10, 3)
    assert (board.sum_of(7, MemberCell.REQUESTS), board.sum_of(7, MemberCell.IN_FLIGHT)) == (8, 2)
    board.clear(7)
    assert [board.sum_of(7, cell) for cell in MemberCell] == [0] * len(MemberCell)
    assert board.total(ProcessCell.REQUESTS) == 10
