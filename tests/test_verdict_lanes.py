"""Which lanes the verdict looks at."""

from __future__ import annotations

import pytest

from gpuinfer.evidence import Evidence


def lane(name, **stations):
    return {"name": name, "stations": stations}


def test_a_lane_that_writes_records_is_no_sign_of_idle_workers():
    run = Evidence(
        wall_s=10.0,
        lanes=[
            lane("worker 0: search", search=9.8, idle=0.2),
            lane("worker 0: records", record=0.5, idle=9.5),
            lane("worker 0: forward 0", forward=5.0, idle=5.0),
        ],
    )
    assert run.busy(run.work) == pytest.approx(0.98)
    assert run.threads_busy == pytest.approx((9.8 + 0.5 + 5.0) / 10.0)


def test_a_forward_of_several_threads_keeps_as_many_cores_busy():
    run = Evidence(wall_s=10.0, lanes=[lane("forward 0", forward=5.0, idle=5.0)], facts={"threads": 4})
    assert run.threads_busy == pytest.approx(2.0)
