"""What a step costs at least, counted by hand; the bare decoder, measured; and a run held against both."""

from dataclasses import asdict, replace

import jsonschema
import numpy as np
import pytest
import torch
from random_models import LLAMA

from gpuinfer.api import ModelSpec, Setup, TextRoofline
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.errors import UsageError
from gpuinfer.report.report import schema
from gpuinfer.report.report_sections import against_text_roofline
from gpuinfer.text import precision, text_roofline
from gpuinfer.text.generator import open_generator
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.text_roofline import StepCost, StepExtent, step_extent
from gpuinfer.text.transformer import PAGE, Experts, Shape, Step
from gpuinfer.workloads.generate.workload import Generate

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Shape(
    family="llama", vocabulary=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=6, positions=64
)
QKV, OUT, MLP, HEAD = (2 + 2) * 2 * 4, 2 * 2 * 4, 3 * 6 * 4, 4 * 10
ALIKE = np.array([[4, 5, 1], [4, 5, 2], [4, 6, 3], [7] * 3], np.int32)  # pages that rows share are read once
LONG = 71 + 67 + sum(range(65, 95)) + 10


def a_step(starts, lengths, wanted=None, sees=None, pages=None):
    tokens, integers = sum(lengths), np.int32
    return Step(
        tokens=np.zeros(tokens, integers),
        pages=np.zeros((len(starts), 4), integers) if pages is None else pages,
        starts=np.asarray(starts, integers),
        lengths=np.asarray(lengths, integers),
        wanted=np.arange(tokens if wanted is None else wanted, dtype=integers),
        sees=None if sees is None else np.asarray(sees, integers),
    )


@pytest.mark.parametrize(
    ("step", "extent"),
    [
        pytest.param(a_step([7], [1]), StepExtent(1, 1, 1, 8, 8), id="a token further"),
        pytest.param(a_step([0], [3], 1), StepExtent(1, 3, 1, 1 + 2 + 3, 3), id="a prompt that begins"),
        pytest.param(a_step([2, 0], [2, 1]), StepExtent(2, 3, 3, 3 + 4 + 1, 4 + 1), id="two rows"),
        pytest.param(a_step([0], [2], sees=[5, 5]), StepExtent(1, 2, 2, 10, 5), id="a canvas that sees further"),
        pytest.param(a_step([0, 4], [2, 1], sees=[2, 2, 9]), StepExtent(2, 3, 3, 13, 11), id="canvases of two rows"),
        pytest.param(
            a_step([70, 66, 64, 9], [1, 1, 30, 1], pages=ALIKE),
            StepExtent(4, 33, 33, LONG, 71 + 67 + 94 + 10 - 3 * 32),
            id="pages that rows share",
        ),
    ],
)
def test_the_extent_of_a_step(step, extent):
    assert step_extent(step) == extent


def test_a_token_meets_every_weight_once_and_what_is_not_wanted_not_chosen_or_beyond_a_window_costs_nothing():
    cost, count = StepCost(SMALL, 4).of(StepExtent(1, 1, 1, 8, 8)), StepCost(SMALL, 4)
    weights = 2 * (QKV + OUT + MLP) + HEAD
    attention = 2 * 4 * 2 * 2 * 8  # layers, operations for a value, heads, values of a head, positions
    cached = 2 * 2 * 1 * 2  # layers, keys and values, heads of them, values of one
    assert (cost.flops, cost.attention) == (2 * weights + attention, attention)
    assert cost.bytes == 4 * (weights + 9 * cached)  # eight positions read, one written
    every, last = (count.of(StepExtent(1, 5, wanted, 15, 5)).flops for wanted in (5, 1))
    assert every - last == 2 * 4 * (OUT + MLP + HEAD)
    windowed = StepCost(replace(SMALL, windows=(4, None)), 4).of(StepExtent(1, 1, 1, 100, 100))
    assert windowed.attention == 4 * 2 * 2 * (4 + 100)
    mixed = StepCost(replace(SMALL, intermediate=0, experts=Experts(count=8, chosen=2, intermediate=3)), 4)
    few, many = (mixed.of(StepExtent(n, n, n, n, n)) for n in (1, 1000))
    read = 2 * (8 - 2) * 3 * 3 * 4 * 4  # the other six, in each layer
    assert many.bytes - few.bytes == pytest.approx(read + 999 * 2 * 4 * 2 * 2 * 1 * 2)
    assert few.flops - few.attention == 2 * (2 * (QKV + OUT + (2 * 3 * 3 + 8) * 4) + HEAD)


class Recorded:
    """A decoder that computes nothing, and refuses steps that none could compute."""

    device, computes_in = CPU, "float32"

    def __init__(self, slots=4, pages=16, length=128, shape=LLAMA):
        self.slots, self.pages, self.length, self.shape = slots, pages, length, shape
        self.steps = []

    def weight_tensors(self):
        return [torch.ones(1000, 3), torch.ones(7, dtype=torch.int16)]

    def forward(self, step):
        ends = step.starts + step.lengths
        assert len(step.starts) <= self.slots
        assert ends.max() <= self.length
        assert len(step.tokens) == step.lengths.sum()
        used = [page for row, end in zip(step.pages, ends, strict=True) for page in row[: -(-int(end) // PAGE)]]
        assert len(set(used)) == len(used), "a page has two rows"
        assert 0 <= min(used) <= max(used) < self.pages
        self.steps.append(step)
        return torch.zeros(len(step.wanted), self.shape.vocabulary)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("decoder", "rows", "tokens"),
    [
        pytest.param(Recorded(), 3, 100, id="as the run had them"),
        pytest.param(Recorded(), 100, 10_000, id="more rows and tokens than there is room for"),
        pytest.param(Recorded(slots=1, pages=1, length=8), 1, 512, id="one page of eight positions"),
        pytest.param(Recorded(slots=64, pages=3), 64, 512, id="fewer pages than slots"),
    ],
)
def test_steps_of_answers_and_of_prompts_are_measured(decoder, rows, tokens):
    found = text_roofline.measure_roofline(decoder, rows, tokens, 0.2)
    assert 1 <= found.at_rows <= min(rows, decoder.slots, decoder.pages)
    assert 1 <= found.at_tokens <= tokens
    assert all(value > 0 for name, value in asdict(found).items() if name.endswith("per_s"))
    assert found.flops_per_s >= found.own_flops_per_s
    assert {len(step.tokens) for step in decoder.steps} == {found.at_rows, found.at_tokens}
    with pytest.raises(UsageError, match="computes nothing"):
        text_roofline.measure_roofline(Recorded(shape=replace(LLAMA, layers=0)), 1, 8, 0.1)


def test_a_look_leaves_out_what_its_threads_waited_for_a_core(monkeypatch):
    """Half of the time in which they wanted one somebody else had it: twice as fast alone."""
    clock = iter([(0.0, 0.0), (1.0, 1.0)])
    monkeypatch.setattr(text_roofline, "cpu_times", lambda: next(clock))
    monkeypatch.setattr(text_roofline.time, "perf_counter", iter(np.arange(0.0, 10.0, 0.5)).__next__)
    rate, served = text_roofline._look(lambda: None, CPU)
    assert (rate, served) == (pytest.approx(1 / (1.0 * 0.5)), 0.5)


BEST = TextRoofline(100e9, 200e9, 20e9, at_rows=64, at_tokens=256, own_flops_per_s=80e9)
EARLIER = replace(BEST, remembered=True)


@pytest.mark.parametrize(
    ("steps", "roofline", "wall_s", "rows", "held"),
    [
        pytest.param({"flops": 2000e9, "bytes": 1e9}, EARLIER, 10.0, 64.0, False, id="beats an earlier one"),
        pytest.param({"flops": 620e9, "bytes": 1e9}, EARLIER, 10.0, 31.0, False, id="far fewer rows than earlier"),
        pytest.param({"flops": 620e9, "bytes": 1e9}, EARLIER, 10.0, 32.0, True, id="half as many rows"),
        pytest.param({"flops": 620e9, "bytes": 1e9}, EARLIER, 10.0, 128.0, True, id="twice as many rows"),
        pytest.param({"flops": 620e9, "bytes": 1e9}, EARLIER, 10.0, 130.0, False, id="far more rows"),
        pytest.param({"flops": 620e9, "bytes": 1e9}, BEST, 10.0, 3.0, True, id="its own, whatever slots allowed"),
        pytest.param({}, BEST, 10.0, 64.0, False, id="nothing was counted"),
        pytest.param({"flops": 1.0}, BEST, 0.0, 64.0, False, id="no time"),
    ],
)
def test_a_run_is_held_against_what_can_be_compared(steps, roofline, wall_s, rows, held):
    assert (against_text_roofline(steps, roofline, wall_s, 500.0, rows) is not None) == held


def test_steps_of_prompts_and_of_answers_are_held_against_the_machine_apart():
    steps = {"flops": 1000e9, "prefill_flops": 400e9, "bytes": 10e9, "prefill_bytes": 1e9}
    found = against_text_roofline(steps, BEST, 10.0, 500.0, 64.0)
    assert (found["least_s"], found["efficiency"]) == pytest.approx((400 / 200 + 600 / 100, 0.8))
    assert (found["tokens_per_s"], found["limited_by"]) == (pytest.approx(500 / 8), "products")
    over = against_text_roofline({"flops": 2000e9, "bytes": 1e9}, BEST, 10.0, 50.0, 64.0)
    assert (over["efficiency"], over["raised"]) == (1.0, True)  # a run never does more than can be done
    for one in (found, over):
        jsonschema.Draft202012Validator(schema()["properties"]["roofline"]).validate(one)
    shown = against_text_roofline({"flops": 620e9, "bytes": 1e9}, BEST, 10.0, 500.0, 64.0)
    report = {"roofline": shown, "wall_s": 10.0, "throughput": {"output_tokens_per_s": 48.0}}
    (line,) = [row.text for row in panel_rows(report) if row.name == "roofline"]
    assert line == "62% of what this machine can do with this model at 64 rows (80.6 tokens/s); limited by products"


@pytest.mark.parametrize("multiplies", [True, False], ids=["multiplies bfloat16", "does not"])
def test_bfloat16_is_multiplied_as_such_only_where_that_is_one_instruction_and_bits_do_not_count(
    monkeypatch, tmp_path, multiplies
):
    """All else is computed in the format of its weights; a run that goes on computes in the same."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: multiplies)
    native = "bfloat16" if multiplies else "float32"
    for deterministic, wanted in ((False, native), (True, "float32")):
        assert precision.computes_in(torch.bfloat16, CPU, deterministic=deterministic) == wanted
    for dtype, device in ((torch.float32, CPU), (torch.float16, CPU), (torch.bfloat16, CUDA), (torch.float32, CUDA)):
        assert precision.computes_in(dtype, device, deterministic=False) == str(dtype).removeprefix("torch.")
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    for device, wanted in (("cpu", native), ("cuda:77", "bfloat16")):  # one that is not here is left to the backend
        setup = Setup(devices=(device,), dtype="bfloat16")
        own = Generate(setup, model="tiny", input=str(tmp_path / "prompts.jsonl"))
        assert own.deciding_settings("")["computes_in"] == wanted
    for dtype in ("float32", "bfloat16"):
        setup = Setup(devices=("cpu",), dtype=dtype, deterministic=True)
        model = ModelSpec(name="tiny", kind="text", arguments={"context": 64})
        generator = open_generator(model, setup, TorchModelOptions(slots=1, threads=1))
        generator.close()
        assert (generator.facts["dtype"], generator.facts["computes_in"]) == (dtype, "float32")
