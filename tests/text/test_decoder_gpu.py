"""On a CUDA device: the same promises as on the CPU, graphs, and what to do when memory runs out."""

from __future__ import annotations

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
CASES = [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in VARIANTS.items()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]
OTHER = TOKENS[::-1]
STEPS = [
    step_of((0, 0, TOKENS[:40]), (3, 0, OTHER[:3]), (1, 0, OTHER[:90])),
    step_of((0, 40, TOKENS[40:70]), (3, 3, [6])),
    *(step_of((0, 70 + at, [5 + at]), (3, 4 + at, [8]), (1, 90 + at, [at])) for at in range(4)),
]


def decoder(shape=LLAMA, dtype=torch.float32, device=CUDA, slots=5, length=160, **options):
    options = {"pages": slots * COLUMNS, "length": length, **options}
    return TorchDecoder(shape, random_weights(shape, dtype), device, dtype, slots=slots, **options)


def all_logits(some, steps=STEPS):
    return torch.cat([some.forward(step).cpu().clone() for step in steps])


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("shape", CASES)
def test_the_device_gives_what_the_cpu_gives(shape, options):
    torch.testing.assert_close(
        all_logits(decoder(shape, **options)), all_logits(decoder(shape, device=CPU)), atol=1e-3, rtol=0
    )


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = [
    pytest.param(("cuda:0",), id="sharing a device"),
    pytest.param(("cuda:0", "cuda:1"), id="a device each", marks=TWO),
]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("shape", CASES)
def test_in_stages_it_gives_that_too(shape, places):
    expected = all_logits(decoder(shape, device=CPU))
    weights = random_weights(shape, torch.float32)
    staged = in_stages(shape, weights, torch.float32, slots=5, length=160, places=places, deterministic=False)
    found = all_logits(staged)
    staged.close()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graphs_give_the_tokens_that_eager_steps_give(dtype):
    graphs, eager = decoder(dtype=dtype, graphs=True), decoder(dtype=dtype, graphs=False)
    assert len(graphs._static._run._graphs) == 0
    for step in STEPS:
        found, wanted = graphs.forward(step).clone(), eager.forward(step)
        torch.testing.assert_close(found, wanted, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)
        two = wanted.topk(2).values
        clear = two[:, 0] - two[:, 1] > 0.2
        assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])
    assert len(graphs._static._run._graphs) >= 1
    assert graphs._static._run.wanted


@pytest.mark.parametrize("graphs", [True, False])
def test_captured_graphs_compute_with_the_weights_that_are_exchanged(graphs):
    found, other = decoder(graphs=graphs), random_weights(LLAMA, seed=9)
    all_logits(found)
    found.swap(found.pack(other))
    options = {"slots": 5, "pages": 5 * COLUMNS, "length": 160, "graphs": graphs}
    wanted = TorchDecoder(LLAMA, other, CUDA, torch.float32, **options)
    torch.testing.assert_close(all_logits(found), all_logits(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_prompt_in_chunks_beside_others_has_the_bits_it_has_token_by_token(dtype, graphs):
    one = decoder(dtype=dtype, slots=1, deterministic=True, graphs=graphs)
    expected = all_logits(one, [step_of((0, at, [token])) for at, token in enumerate(TOKENS)])
    several = decoder(dtype=dtype, deterministic=True, graphs=graphs)
    found = all_logits(
        several,
        [
            step_of((2, 0, TOKENS[:40]), (0, 0, OTHER[:7])),
            step_of((2, 40, TOKENS[40:43]), (1, 0, OTHER[:20]), (0, 7, OTHER[7:8])),
            step_of((2, 43, TOKENS[43:])),
        ],
    )
    assert torch.equal(torch.cat([found[:40], found[47:50], found[71:]]), expected)


def canvas(slot, tokens, start=0, end=None):
    """Tokens that see all of their row, which has as many as it ends at."""
    return slot, start, tokens, [end or len(tokens)] * len(tokens)


MASKED = replace(LLAMA, masking=Masking(0))
SEEING = [
    seeing(canvas(0, TOKENS[:40]), canvas(3, OTHER[:140]), canvas(1, OTHER[:90])),
    *(seeing(canvas(0, OTHER[8:24], 8, 40), canvas(3, TOKENS[64:80], 64, 140)) for _ in range(4)),
    seeing(canvas(1, [5], 3, 90), canvas(0, [6], 30, 40)),
]
MIXED = [pytest.param(replace(MASKED, **changes), id=name) for name, changes in MIXTURES.items()]


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("shape", [*CASES, pytest.param(MASKED, id="masked"), *MIXED])
def test_tokens_that_see_what_comes_after_them_are_those_of_the_cpu(shape, options):
    found = all_logits(decoder(shape, **options), SEEING)
    torch.testing.assert_close(found, all_logits(decoder(shape, device=CPU), SEEING), atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [pytest.param(MASKED, id="masked"), *MIXED[:4]])
def test_short_runs_become_graphs(shape):
    graphs, eager = (decoder(shape, torch.bfloat16, graphs=wanted) for wanted in (True, False))
    torch.testing.assert_close(all_logits(graphs, SEEING), all_logits(eager, SEEING), atol=0.2, rtol=0)
    assert any(form.width == 16 for form in graphs._static._run._graphs)
    assert graphs._static._run.wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [pytest.param(MASKED, id="masked"), *MIXED])
def test_a_canvas_has_the_same_bits_alone_and_in_company(shape, dtype):
    one = decoder(shape, dtype, slots=1, deterministic=True)
    expected = all_logits(one, [seeing(canvas(0, TOKENS[:67]))])
    several = decoder(shape, dtype, deterministic=True)
    found = all_logits(several, [seeing(canvas(1, OTHER[:140]), canvas(2, TOKENS[:67]), canvas(0, OTHER[:9]))])
    assert torch.equal(found[140:207], expected)
    part = all_logits(several, [seeing(canvas(2, TOKENS[11:30], 11, 67), canvas(4, OTHER[:50]))])
    assert torch.equal(part[:19], expected[11:30])


KINDS = [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in (VARIANTS | MIXTURES).items()]
TRITON = pytest.mark.skipif(not triton_layers.has_triton(), reason="needs Triton")


@TRITON
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(pytest.param(*kind.values, torch.float32, id=kind.id) for kind in KINDS),
        *(pytest.param(LLAMA, dtype, id=str(dtype)) for dtype in DTYPES[1:]),
    ],
)
def test_our_kernels_answer_as_torchs_layers_do(shape, dtype):
    ours, theirs = (decoder(shape, dtype, kernels=kernels) for kernels in (True, False))
    assert isinstance(ours._layers, TritonLayers), "they are not used"
    found, wanted = all_logits(ours), all_logits(theirs)
    leeway = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    assert (found - wanted).abs().max() < leeway * wanted.abs().max()


@TRITON
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [pytest.param(MASKED, id="masked"), *MIXED[:2]])
def test_our_kernels_answer_canvases_as_torchs_layers_do(shape, dtype):
    ours, theirs = (decoder(shape, dtype, kernels=kernels) for kernels in (True, False))
    found, wanted = all_logits(ours, SEEING), all_logits(theirs, SEEING)
    leeway = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    assert (found - wanted).abs().max() < leeway * wanted.abs().max()


@TRITON
def test_a_long_row_in_portions_is_answered_as_by_torch():
    """Few rows of many positions: several programs share one, and another kernel joins what they find."""
    shape = replace(LLAMA, positions=4096)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, LLAMA.vocabulary, 3000)]
    given = {"tokens": np.array(tokens, np.int32), "pages": np.arange(128, dtype=np.int32)[None]}
    numbers = {name: np.array([value], np.int32) for name, value in (("starts", 0), ("lengths", 3000))}
    prompt = Step(**given, **numbers, wanted=np.array([2999], np.int32))
    one = {"tokens": np.array([5], np.int32), "starts": np.array([3000], np.int32), "lengths": np.array([1], np.int32)}
    after = replace(prompt, **one, wanted=np.array([0], np.int32))
    ours, theirs = (decoder(shape, slots=1, pages=128, length=4096, kernels=kernels) for kernels in (True, False))
    found, wanted = all_logits(ours, [prompt, after]), all_logits(theirs, [prompt, after])
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_step_in_another_order_have_the_same_bits(dtype):
    """A step of 256 rows, when `deterministic`."""
    rows, dice = 256, np.random.default_rng(3)
    some = decoder(dtype=dtype, slots=rows, pages=rows * COLUMNS, deterministic=True)
    lengths = dice.integers(1, 40, rows)
    begun = [step_of((row, 0, TOKENS[: lengths[row]]), last_only=True) for row in range(rows)]
    for step in begun:
        some.forward(step)
    segments = [(row, int(lengths[row]), [int(dice.integers(0, LLAMA.vocabulary))]) for row in range(rows)]
    reference = some.forward(step_of(*segments)).clone()
    for _ in range(3):
        order = dice.permutation(rows)
        found = some.forward(step_of(*(segments[row] for row in order)))
        assert torch.equal(found, reference[torch.from_numpy(order).to(found.device)])


@pytest.mark.parametrize("graphs", [True, False])
def test_two_models_at_once_do_not_mix(graphs):
    weights = [random_weights(LLAMA, seed=seed) for seed in (1, 2)]
    options = {"slots": 5, "pages": 5 * COLUMNS, "length": 160, "graphs": graphs}
    models = [TorchDecoder(LLAMA, given, CUDA, torch.float32, **options) for given in weights]
    expected = [all_logits(TorchDecoder(LLAMA, given, CPU, torch.float32, **options)) for given in weights]
    found: list[list[torch.Tensor]] = [[], []]

    def compute(number):
        for _ in range(10):
            found[number].append(all_logits(models[number]))

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for ours, wanted in zip(found, expected, strict=True):
        assert len(ours) == 10
        for one in ours:
            torch.testing.assert_close(one, wanted, atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_torch_compiles_gives_what_is_not_compiled():
    torch.testing.assert_close(all_logits(decoder(compile=True)), all_logits(decoder()), atol=1e-4, rtol=0)


def test_pages_are_found_by_trying_and_the_estimate_is_near():
    shape = replace(
        LLAMA, layers=8, heads=16, kv_heads=8, head_dim=64, hidden=1024, intermediate=2048, vocabulary=32000
    )
    shape = replace(shape, rope=replace(shape.rope, inverse_frequencies=tuple(0.9**i for i in range(32))))
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
