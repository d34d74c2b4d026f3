"""Each function of gpuinfer that asks for CUDA, in the source, and the test here that runs it on fake tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuinfer

SOURCES = Path(gpuinfer.__file__).parent
HERE = Path(__file__).parent
TAKEN = {
    "test_decoder_on_fake_cuda.py::test_a_layer_is_few_launches_and_a_step_one_copy": (
        "models/cuda_graphs.py event_behind",
        "text/decoder/torch_batch.py Uploads.copy",
        "text/decoder/torch_batch.py host_memory",
        "text/decoder/torch_cache.py PageCache.read",
        "text/decoder/torch_cache.py zeros",
        "text/decoder/torch_decoder.py TorchDecoder.__init__",
        "text/decoder/torch_decoder.py TorchDecoder._chosen_layers",
        "text/decoder/torch_decoder.py TorchDecoder._drop",
        "text/decoder/torch_decoder.py TorchDecoder.resize",
        "text/decoder/torch_static.py Replays.__init__",
        "text/decoder/triton_layers.py TritonLayers.hidden",
    ),
    "test_decoder_on_fake_cuda.py::test_rows_with_adapters_and_hidden_states_run_on_the_device_too": (
        "text/decoder/torch_decoder.py TorchDecoder._made_here",
    ),
    "test_decoder_on_fake_cuda.py::test_weights_that_are_exchanged_are_kept_until_they_are_copied": (
        "text/decoder/torch_decoder.py _keep_for_steps",
    ),
    "test_devices_on_fake_cuda.py::test_a_device_that_still_answers_is_not_lost": (
        "models/out_of_memory.py answers",
        "models/out_of_memory.py is_lost",
    ),
    "test_devices_on_fake_cuda.py::test_a_gauge_tells_what_tensors_and_allocator_hold": (
        "models/device.py Gauge.__init__",
        "models/device.py Gauge.read",
        "models/device.py device_name",
    ),
    "test_devices_on_fake_cuda.py::test_devices_are_found_by_name": (
        "models/device.py _every",
        "models/device.py cuda_state",
        "models/device.py device_labels",
        "models/device.py of_each",
        "models/device.py resolve_device",
        "models/device.py resolve_devices",
        "models/model_options.py index_of",
    ),
    "test_devices_on_fake_cuda.py::test_memory_that_ran_out_is_given_back_before_a_smaller_step": (
        "text/generator/fault_isolation.py Troubles._shrink",
    ),
    "test_devices_on_fake_cuda.py::test_the_roofline_of_text_waits_for_the_device_after_each_pass": (
        "models/pinned_memory.py queued",
        "text/text_roofline.py _look",
        "text/text_roofline.py bytes_per_s",
        "text/text_roofline.py measure",
        "text/decoder/torch_decoder.py TorchDecoder.use",
    ),
    "test_devices_on_fake_cuda.py::test_steps_are_larger_on_a_device_and_weights_meet_rows_of_their_own_format": (
        "text/precision.py computes_in",
        "text/generator/setup.py usual_step_tokens",
    ),
    "test_memory_on_fake_cuda.py::test_a_meter_reads_the_devices_allocator_once_the_device_is_done": (
        "models/footprint.py CudaMeter.bound",
        "models/footprint.py CudaMeter.forget",
        "models/footprint.py CudaMeter.free",
        "models/footprint.py CudaMeter.held",
        "models/footprint.py CudaMeter.peak",
        "models/footprint.py meter_of",
    ),
    "test_memory_on_fake_cuda.py::test_a_model_is_described_and_tried_on_the_device": (
        "lab/memory/batch_trials.py Examination.__init__",
        "lab/memory/probe_child.py _subjects",
        "lab/memory/probe_child.py examine",
        "lab/memory/rows_memory.py RowsSubject.__init__",
        "lab/memory/rows_memory.py RowsSubject.describe",
        "lab/memory/rows_memory.py RowsSubject.parts",
        "lab/memory/rows_memory.py warm_up",
        "lab/memory/rows_memory.py StagedRows.__init__",
        "lab/memory/rows_memory.py _stage",
        "lab/memory/text_memory.py StagedText.pages",
        "lab/memory/text_memory.py usual_slots",
        "models/footprint.py bytes_of_a_row",
        "models/footprint.py device_peaks",
        "models/device.py other_processes",
    ),
    "test_rows_on_fake_cuda.py::test_a_batch_is_one_graph_and_one_wait": (
        "models/cuda_graphs.py captured",
        "models/cuda_graphs.py new_stream",
        "models/cuda_graphs.py release_cached_memory",
        "models/cuda_graphs.py wait_for_device",
        "models/forward_cuda.py CudaForward.__init__",
        "models/forward_cuda.py CudaForward._answer",
        "models/forward_cuda.py CudaForward._attempt",
        "models/forward_cuda.py CudaForward._warm_up_to",
        "models/forward_cuda.py Slot.__init__",
        "models/networks.py Affine.best",
        "models/networks.py Affine.relu",
        "models/open_model.py computing_threads",
        "models/open_model.py limits_for",
        "models/open_model.py open_model",
    ),
    "test_rows_on_fake_cuda.py::test_rows_in_pinned_blocks_go_straight_to_the_device": (
        "models/pinned_memory.py call",
        "models/pinned_memory.py register",
    ),
    "test_rows_on_fake_cuda.py::test_the_roofline_waits_for_the_device_around_what_it_times": (
        "models/roofline_measurement.py cuda_looks",
        "models/roofline_measurement.py launcher",
        "models/roofline_measurement.py launcher.eager",
        "models/roofline_measurement.py launcher.replay",
        "models/roofline_measurement.py measure",
        "models/roofline_measurement.py measured_on",
        "models/roofline_measurement.py measured_on.look",
    ),
    "test_sampling_counts.py::test_a_draw_waits_once_and_sends_one_copy_whatever_the_rows": (
        "text/sampling/sampler.py Sampler.__init__",
        "text/sampling/triton_draws.py draws_for",
    ),
    "test_stages_on_fake_cuda.py::test_layers_are_timed_where_they_would_run_and_the_device_waited_for": (
        "models/pipeline/open_pipeline.py cut_model",
        "models/pipeline/open_pipeline.py limits_of",
        "models/pipeline/open_pipeline.py stages_at",
        "models/pipeline/stage_plan.py count_for",
        "models/pipeline/stage_plan.py room_on",
        "models/pipeline/stage_plan.py _pass",
        "models/pipeline/stage_plan.py _wait_for",
    ),
    "test_stages_on_fake_cuda.py::test_rows_cross_the_stages_of_one_device": (
        "models/pipeline/stage.py CudaStage.at_work",
        "models/pipeline/stage.py CudaStage.compute",
        "models/pipeline/stage.py Launched.for_stream",
    ),
    "test_streams.py::test_an_adapter_that_another_thread_packs_is_given_back_behind_a_step": (
        "models/cuda_graphs.py own_stream",
    ),
    "test_text_on_fake_cuda.py::test_log_probabilities_of_prompts_are_read_for_each_chunk": (
        "text/checkpoint/memory_estimate.py most_copied",
        "text/decoder/open_decoder.py open_sized",
        "text/decoder/open_decoder.py own_kernels",
        "text/decoder/open_decoder.py estimate",
        "text/decoder/open_decoder.py free_memory",
        "text/decoder/open_decoder.py largest_step_bytes",
        "text/generator/generator.py Generator.__init__",
        "text/generator/setup.py _assembled",
        "text/sampling/torch_path.py Download.__init__",
    ),
    "test_text_on_fake_cuda.py::test_masks_are_blended_on_the_device": (
        "text/diffusion/scoring.py Blender.blended",
        "text/diffusion/scoring.py Scorer.__init__",
    ),
    "test_text_on_fake_cuda.py::test_stages_answer_as_one_device_does": (
        "text/stages/staged_decoder.py StagedDecoder._here",
        "text/stages/staged_decoder.py StagedDecoder._rooms",
        "text/stages/open_staged_decoder.py Making.decoder",
        "text/stages/open_staged_decoder.py _stages",
        "text/stages/open_staged_decoder.py cutter_of",
        "text/stages/open_staged_decoder.py open_in_stages",
        "text/stages/open_staged_decoder.py _seconds",
    ),
    "test_training_on_fake_cuda.py::test_a_pass_reads_back_the_loss_and_the_gradients": (
        "models/gradients.py GradientPass._gradients",
        "models/gradients.py GradientPass._mark",
        "models/gradients.py GradientPass._passed",
        "models/gradients.py GradientPass._random",
        "models/gradients.py open_gradients",
        "models/losses.py _number",
        "models/losses.py read",
    ),
}
ELSEWHERE = {
    "models/device.py handle_of": "NVML, for which tests/test_nvml.py has a driver's library that is made up",
    "lab/peers/with_transformers.py _device": "the process of another generator, which a benchmark starts",
    "text/checkpoint/pickle_reader.py plain_tensors": "where a pickle says that its tensors are, for tests",
    "text/decoder/triton_layers.py compare_shared": "kernels in Triton, which tests/triton_kernels interprets",
    "text/sampling/triton_draws.py TritonDraws._launch": "kernels in Triton, which tests/triton_kernels interprets",
    "lab/verify/diffusion_checks.py Masks._judge": "a comparison of answers, which fake tensors do not have",
}


def is_branch(node: ast.AST) -> bool:
    """Whether this asks for CUDA: a comparison of a device's type, or a part of torch that only CUDA has."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        words = {one.value for one in sides if isinstance(one, ast.Constant)}
        typed = any(isinstance(one, ast.Attribute) and one.attr == "type" for one in sides)
        return "cuda" in words or ("cpu" in words and typed)
    if not isinstance(node, ast.Attribute):
        return False
    of_torch = isinstance(node.value, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    return node.attr == "is_cuda" or of_torch


def branches_in(node: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """The function around each branch on CUDA, and its line. What is only an annotation is none."""
    if is_branch(node):
        yield function or "outside of functions", node.lineno
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from branches_in(child, f"{function}.{child.name}".lstrip("."))
            elif isinstance(child, ast.AST):
                yield from branches_in(child, function)


def branches() -> dict[str, int]:
    """`models/out_of_memory.py answers` → the first line in it that asks for CUDA."""
    found: dict[str, int] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text()
        if "cuda" not in source and '"cpu"' not in source:
            continue
        for function, line in branches_in(ast.parse(source)):
            found.setdefault(f"{path.relative_to(SOURCES).as_posix()} {function}", line)
    return found


def test_every_branch_on_cuda_is_taken_by_a_test_or_has_a_reason():
    found, listed = branches(), [name for names in TAKEN.values() for name in names] + [*ELSEWHERE]
    new = [f"gpuinfer/{name.replace(' ', f':{line} ')}" for name, line in found.items() if name not in listed]
    assert not new, (
        f"{', '.join(new)}: no test runs this on a CUDA device. Write one here that does, with the fixture `cuda`, and "
        "name the function beside it in TAKEN; or give the reason in ELSEWHERE why none can."
    )
    gone = [name for name in listed if name not in found]
    assert not gone, f"{', '.join(gone)}: no longer asks for CUDA, or not under this name. Take it out of TAKEN."
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("test", TAKEN)
def test_each_test_that_takes_a_branch_is_there(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (HERE / file).read_text()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(device):\n    if device.type == 'cuda':\n        pass", [("f", 2)]),
        ("class A:\n    def f(self):\n        return self.device.type != 'cpu'", [("A.f", 3)]),
        ("def f(inputs):\n    return lambda: inputs.is_cuda", [("f", 2)]),
        ("def f():\n    def g():\n        torch.cuda.empty_cache()", [("f.g", 3)]),
        ("x = torch.cuda.Stream()", [("outside of functions", 1)]),
        ("def f(stream: torch.cuda.Stream) -> torch.cuda.Event: ...", []),
        ("def f(name):\n    return name == 'cpu'", []),
    ],
)
def test_branches_are_found_in_source(source, found):
    assert list(branches_in(ast.parse(source))) == found
