"""A run of a model of text against the least time that its steps take."""

from dataclasses import replace

import jsonschema
import pytest

from gpuinfer.api import TextRoofline
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.report.report import schema
from gpuinfer.report.report_sections import against_text_roofline

BEST = TextRoofline(100e9, 200e9, 20e9, at_rows=64, at_tokens=256, own_flops_per_s=80e9)
ROOFLINE = jsonschema.Draft202012Validator(schema()["properties"]["roofline"])


def test_steps_of_prompts_and_of_answers_are_held_against_the_machine_apart():
    steps = {"flops": 1000e9, "prefill_flops": 400e9, "bytes": 10e9, "prefill_bytes": 1e9}
    found = against_text_roofline(steps, BEST, 10.0, 500.0, 64.0)
    assert found["least_s"] == pytest.approx(400 / 200 + 600 / 100)
    assert found["efficiency"] == pytest.approx(0.8)
    assert found["tokens_per_s"] == pytest.approx(500 / 8)
    assert found["limited_by"] == "products"
    ROOFLINE.validate(found)


def test_a_run_is_never_said_to_do_more_than_can_be_done():
    found = against_text_roofline({"flops": 2000e9, "bytes": 1e9}, BEST, 10.0, 50.0, 64.0)
    assert (found["efficiency"], found["raised"]) == (1.0, True)
    ROOFLINE.validate(found)


def test_a_run_that_beats_what_an_earlier_one_has_measured_is_held_against_nothing():
    assert (
        against_text_roofline({"flops": 2000e9, "bytes": 1e9}, replace(BEST, remembered=True), 10.0, 50.0, 64.0) is None
    )


def test_a_run_is_not_held_against_steps_of_far_other_sizes_that_an_earlier_one_has_measured():
    steps, earlier = {"flops": 620e9, "bytes": 1e9}, replace(BEST, remembered=True)
    held = {
        rows: against_text_roofline(steps, earlier, 10.0, 500.0, rows) is not None
        for rows in (3.0, 31.0, 32.0, 128.0, 130.0)
    }
    assert held == {3.0: False, 31.0: False, 32.0: True, 128.0: True, 130.0: False}
    assert against_text_roofline(steps, BEST, 10.0, 500.0, 3.0) is not None, (
        "its own measurement counts, whatever slots allowed"
    )


def test_where_nothing_was_counted_there_is_no_roofline():
    assert against_text_roofline({}, BEST, 10.0, 50.0, 64.0) is None
    assert against_text_roofline({"flops": 1.0}, BEST, 0.0, 50.0, 64.0) is None


def test_the_panel_says_what_share_of_the_machine_it_was_and_what_limits_it():
    found = against_text_roofline({"flops": 620e9, "bytes": 1e9}, BEST, 10.0, 500.0, 64.0)
    (line,) = [
        row.text
        for row in panel_rows({"roofline": found, "wall_s": 10.0, "throughput": {"output_tokens_per_s": 48.0}})
        if row.name == "roofline"
    ]
    assert line == "62% of what this machine can do with this model at 64 rows (80.6 tokens/s); limited by products"
