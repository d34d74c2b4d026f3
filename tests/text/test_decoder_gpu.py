"""On a CUDA device: the same promises as on the CPU, graphs, and what to do when memory runs out."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import in_stages
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import COLUMNS, seeing, step_of

from gpuinfer.text.decoder import triton_layers
from gpuinfer.text.decoder.open_decoder import estimate, free_memory, open_and_try
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.triton_layers import TritonLayers
from gpuinfer.text.transformer import Masking, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MASKED = replace(LLAMA, masking=Masking(0))
CAUSAL = {name: replace(LLAMA, **changes) for name, changes in (VARIANTS | MIXTURES).items()}
CANVASES = {"masked": MASKED} | {f"masked, {name}": replace(MASKED, **changes) for name, changes in MIXTURES.items()}
SHAPES = CAUSAL | CANVASES
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]


def canvas(slot, tokens, start=0, end=None):
    """Tokens that see all of their row, which has as many as it ends at."""
    return slot, start, tokens, [end or len(tokens)] * len(tokens)


STEPS = [
    step_of((0, 0, TOKENS[:40]), (3, 0, OTHER[:3]), (1, 0, OTHER[:90])),
    step_of((0, 40, TOKENS[40:70]), (3, 3, [6])),
    *(step_of((0, 70 + at, [5 + at]), (3, 4 + at, [8]), (1, 90 + at, [at])) for at in range(4)),
]
SEEING = [
    seeing(canvas(0, TOKENS[:40]), canvas(3, OTHER[:140]), canvas(1, OTHER[:90])),
    *(seeing(canvas(0, OTHER[8:24], 8, 40), canvas(3, TOKENS[64:80], 64, 140)) for _ in range(4)),
    seeing(canvas(1, [5], 3, 90), canvas(0, [6], 30, 40)),
]


def decoder(shape=LLAMA, dtype=torch.float32, device=CUDA, slots=5, length=160, weights=None, **options):
    options = {"pages": slots * COLUMNS, "length": length, **options}
    return TorchDecoder(shape, weights or random_weights(shape, dtype), device, dtype, slots=slots, **options)


def all_logits(some, steps=STEPS):
    return torch.cat([some.forward(step).cpu().clone() for step in steps])


def assert_near(found, wanted, atol=1e-3):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_device_gives_what_the_cpu_gives(name, options):
    shape = SHAPES[name]
    steps = SEEING if name in CANVASES else [*STEPS, *SEEING]
    assert_near(all_logits(decoder(shape, **options), steps), all_logits(decoder(shape, device=CPU), steps))


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("places", [("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_in_stages_it_gives_that_too(name, places):
    shape = CAUSAL[name]
    options = {"slots": 5, "length": 160, "places": places, "deterministic": False}
    with contextlib.closing(in_stages(shape, random_weights(shape), torch.float32, **options)) as staged:
        assert_near(all_logits(staged), all_logits(decoder(shape, device=CPU)))


@each_dtype
def test_graphs_give_the_tokens_that_eager_steps_give(dtype):
    graphs, eager = decoder(dtype=dtype, graphs=True), decoder(dtype=dtype, graphs=False)
    assert len(graphs._static._run._graphs) == 0
    for step in STEPS:
        found, wanted = graphs.forward(step).clone(), eager.forward(step)
        assert_near(found, wanted, 1e-4 if dtype == torch.float32 else 0.1)
        two = wanted.topk(2).values
        clear = two[:, 0] - two[:, 1] > 0.2
        assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])
    assert len(graphs._static._run._graphs) >= 1
    assert graphs._static._run.wanted


@pytest.mark.parametrize("name", list(CANVASES)[:5])
def test_short_runs_become_graphs(name):
    graphs, eager = (decoder(CANVASES[name], torch.bfloat16, graphs=wanted) for wanted in (True, False))
    assert_near(all_logits(graphs, SEEING), all_logits(eager, SEEING), 0.2)
    assert any(form.width == 16 for form in graphs._static._run._graphs)
    assert graphs._static._run.wanted


@pytest.mark.parametrize("graphs", [True, False])
def test_captured_graphs_compute_with_the_weights_that_are_exchanged(graphs):
    found, other = decoder(graphs=graphs), random_weights(LLAMA, seed=9)
    all_logits(found)
    found.swap(found.pack(other))
    assert_near(all_logits(found), all_logits(decoder(weights=other, graphs=graphs)), 1e-4)


@each_dtype
@pytest.mark.parametrize("graphs", [True, False])
def test_a_prompt_in_chunks_beside_others_has_the_bits_it_has_token_by_token(dtype, graphs):
    one = decoder(dtype=dtype, slots=1, deterministic=True, graphs=graphs)
    expected = all_logits(one, [step_of((0, at, [token])) for at, token in enumerate(TOKENS)])
    steps = [
        step_of((2, 0, TOKENS[:40]), (0, 0, OTHER[:7])),
        step_of((2, 40, TOKENS[40:43]), (1, 0, OTHER[:20]), (0, 7, OTHER[7:8])),
        step_of((2, 43, TOKENS[43:])),
    ]
    found = all_logits(decoder(dtype=dtype, deterministic=True, graphs=graphs), steps)
    assert torch.equal(torch.cat([found[:40], found[47:50], found[71:]]), expected)


@each_dtype
@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_has_the_same_bits_alone_and_in_company(name, dtype):
    one, several = (decoder(CANVASES[name], dtype, slots=slots, deterministic=True) for slots in (1, 5))
    expected = all_logits(one, [seeing(canvas(0, TOKENS[:67]))])
    found = all_logits(several, [seeing(canvas(1, OTHER[:140]), canvas(2, TOKENS[:67]), canvas(0, OTHER[:9]))])
    assert torch.equal(found[140:207], expected)
    part = all_logits(several, [seeing(canvas(2, TOKENS[11:30], 11, 67), canvas(4, OTHER[:50]))])
    assert torch.equal(part[:19], expected[11:30])


@each_dtype
def test_rows_of_a_step_in_another_order_have_the_same_bits(dtype):
    """A step of 256 rows, when `deterministic`."""
    rows, dice = 256, np.random.default_rng(3)
    some, lengths = decoder(dtype=dtype, slots=rows, deterministic=True), dice.integers(1, 40, rows)
    for row in range(rows):
        some.forward(step_of((row, 0, TOKENS[: lengths[row]]), last_only=True))
    segments = [(row, int(lengths[row]), [int(dice.integers(0, LLAMA.vocabulary))]) for row in range(rows)]
    reference = some.forward(step_of(*segments)).clone()
    for _ in range(3):
        order = dice.permutation(rows)
        found = some.forward(step_of(*(segments[row] for row in order)))
        assert torch.equal(found, reference[torch.from_numpy(order).to(found.device)])


TRITON = pytest.mark.skipif(not triton_layers.has_triton(), reason="needs Triton")
LEEWAY = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
HALF = [(name, dtype) for name in ["plain", *list(CANVASES)[:3]] for dtype in DTYPES[1:]]


@TRITON
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in SHAPES), *HALF], ids=str)
def test_our_kernels_answer_as_torchs_layers_do(name, dtype):
    ours, theirs = (decoder(SHAPES[name], dtype, kernels=kernels) for kernels in (True, False))
    assert isinstance(ours._layers, TritonLayers), "they are not used"
    steps = SEEING if name in CANVASES else STEPS
    found, wanted = all_logits(ours, steps), all_logits(theirs, steps)
    assert (found - wanted).abs().max() < LEEWAY[dtype] * wanted.abs().max()


@TRITON
def test_a_long_row_in_portions_is_answered_as_by_torch():
    """Few rows of many positions: several programs share one, and another kernel joins what they find."""

    def step(tokens, start):
        pages, end = np.arange(128, dtype=np.int32)[None], np.array([len(tokens)], np.int32)
        return Step(np.array(tokens, np.int32), pages, np.array([start], np.int32), end, end - 1)

    tokens = np.random.default_rng(1).integers(0, LLAMA.vocabulary, 3000).tolist()
    options = {"slots": 1, "pages": 128, "length": 4096}
    shape, steps = replace(LLAMA, positions=4096), [step(tokens, 0), step([5], 3000)]
    ours, theirs = (all_logits(decoder(shape, kernels=kernels, **options), steps) for kernels in (True, False))
    assert_near(ours, theirs)


@pytest.mark.parametrize("graphs", [True, False])
def test_two_models_at_once_do_not_mix(graphs):
    weights = [random_weights(LLAMA, seed=seed) for seed in (1, 2)]
    models = [decoder(weights=given, graphs=graphs) for given in weights]
    found: list[list[torch.Tensor]] = [[], []]

    def compute(number):
        for _ in range(10):
            found[number].append(all_logits(models[number]))

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for ours, given in zip(found, weights, strict=True):
        wanted = all_logits(decoder(weights=given, device=CPU, graphs=graphs))
        assert len(ours) == 10
        for one in ours:
            assert_near(one, wanted)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_torch_compiles_gives_what_is_not_compiled():
    assert_near(all_logits(decoder(compile=True)), all_logits(decoder()), 1e-4)


def test_pages_are_found_by_trying_and_the_estimate_is_near():
    large = {"layers": 8, "heads": 16, "kv_heads": 8, "head_dim": 64, "hidden": 1024, "intermediate": 2048}
    rope = replace(LLAMA.rope, inverse_frequencies=tuple(0.9**i for i in range(32)))
    shape = replace(LLAMA, **large, vocabulary=32000, rope=rope)
    some = decoder(shape, torch.bfloat16, slots=1, length=1024)
    wanted = {"slots": 64, "pages": None, "length": 1024, "step_tokens": 512}
    some, sizing = open_and_try(some, estimate(shape, torch.bfloat16, CUDA, free_memory(CUDA), **wanted), 512)
    assert some.slots == sizing.slots == 64
    assert some.pages == sizing.pages == 64 * 32
    assert some.cache_bytes() < sizing.measured_bytes < 2 * sizing.estimated_bytes


def test_when_memory_runs_out_there_are_fewer_pages_and_the_work_goes_on(caplog):
    some = decoder(slots=1, length=4096)
    wanted = {"slots": 64, "pages": None, "length": 4096, "step_tokens": 64}
    sizing = estimate(LLAMA, torch.float32, CUDA, 1 << 60, **wanted)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(CUDA) + sizing.cache_bytes // 2
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info(CUDA)[1], CUDA)
    try:
        some, sizing = open_and_try(some, sizing, 64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    assert 128 <= some.pages < 64 * 128
    assert any("going on with" in message for message in caplog.messages)
    assert some.forward(step_of((0, 0, TOKENS))).isfinite().all()
