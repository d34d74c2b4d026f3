"""No circles of imports, parts know one another by their facades, and nothing heavy is imported before its use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gpuinfer"

# What others may import of a part: its modules with these names, from the part on. All else is the part's own affair.
FACADES: dict[str, set[str]] = {
    "backends": {"fallback", "inprocess", "service_model", "vllm_engine.list_constraints"},
    "central": {"async_client", "connection", "protocol", "server", "server_process", "training_process"},
    "cluster": {
        "cluster_backend",
        "cluster_workload",
        "coordinator",
        "coordinator_core",
        "ledger",
        "messages",
        "node",
        "node_figures",
        "node_processes",
        "range_policy",
    },
    "cli": {"screen.display", "screen.final_panel"},
    "config": {
        "blame",
        "foreign_names",
        "import_paths",
        "model_names",
        "options",
        "packages.installer",
        "packages.package_info",
        "packages.places",
        "packages.template",
        "registry",
        "settings",
        "setup_file",
    },
    "engine": {
        "arrivals",
        "core",
        "engine",
        "lanes",
        "profiler",
        "results",
        "scheduler",
        "stream",
        "trace_merge",
        "trace_reader",
        "trace_recorder",
        "watchdog",
    },
    "fleet": {
        "folder",
        "haproxy",
        "kubernetes.manifest_options",
        "kubernetes.pods",
        "kubernetes.run_manifests",
        "kubernetes.server_manifests",
        "kubernetes.yaml_text",
        "owned_fleet",
        "plan",
        "replica_client",
        "router.request_queue",
        "routing_policies",
        "supervisor",
        "systemd_unit",
    },
    "host": {
        "child",
        "children",
        "compile_status",
        "cpu_contention",
        "error_text",
        "event_loop",
        "extras",
        "files",
        "installation",
        "journal",
        "machine",
        "otlp",
        "process",
        "process_memory",
        "shared_memory",
        "signals",
        "terminal",
    },
    "http": {"access", "client", "http_exchange", "network", "parser", "route_table", "server"},
    "launchers": {"base", "local"},
    "lab": {
        "bench.ablation",
        "bench.advice_trial",
        "bench.bench_document",
        "bench.bench_tables",
        "bench.comparison",
        "bench.generators",
        "bench.generators_tables",
        "bench.measurement",
        "bench.series",
        "bench.tuning",
        "loop.cluster_games",
        "loop.loop_figures",
        "loop.loop_runner",
        "loop.loop_summary",
        "loop.loop_times",
        "memory.memory_options",
        "memory.memory_probe",
        "network_options",
        "peers.peer_process",
        "presenter",
        "rollouts_bench.constraint_speed",
        "rollouts_bench.recorded_games",
        "rollouts_bench.rollouts_cases",
        "rollouts_bench.rollouts_tables",
        "serve_bench.load_generator",
        "serve_bench.load_series",
        "serve_bench.load_summary",
        "serve_bench.load_tables",
        "serve_bench.requests",
        "serve_bench.target_server",
        "simulate",
        "simulate.cluster_figures",
        "simulate.event_loop",
        "simulate.fitting",
        "simulate.outcome",
        "simulate.simulated_cluster",
        "simulate.simulated_router",
        "simulate.simulation_tables",
        "verify.perplexity",
        "verify.rows_verification",
        "verify.verification",
        "verify.verify_setup",
    },
    "library": {
        "batcher",
        "chat_answers",
        "choices",
        "game_folder",
        "llm",
        "measured",
        "model_group",
        "selfplay",
        "server",
        "text_answers",
        "text_scores",
    },
    "models": {
        "cuda_graphs",
        "data_parallel",
        "device",
        "device_arbiter",
        "footprint",
        "forward_cpu",
        "forward_cuda",
        "forward_leaves_cuda",
        "gradients",
        "kernel_cache",
        "load",
        "losses",
        "memory_watch",
        "merged_records",
        "model_object",
        "model_options",
        "onnx_export",
        "open_model",
        "out_of_memory",
        "pinned_memory",
        "pipeline.open_pipeline",
        "pipeline.schedule",
        "pipeline.stage",
        "pipeline.stage_plan",
        "positions",
        "positions_parquet",
        "processor",
        "record_shards",
        "roofline_measurement",
        "roofline_process",
        "row_blocks",
        "row_format",
        "row_layout",
    },
    "report": {
        "causes_text",
        "cluster_forecast",
        "cluster_state",
        "document",
        "game_statistics",
        "plotting",
        "report",
        "report_sections",
        "verdict",
    },
    "rollouts": {
        "agent",
        "concurrency",
        "environment",
        "export",
        "export.samples",
        "files",
        "files.parquet",
        "gameplay",
        "guarded_environment",
        "meter",
        "record",
        "reference_model",
        "rollout_loop",
        "steps",
        "trainer",
        "trainer_server",
        "training",
    },
    "runtime": {"background_run", "background_session", "run", "run_roofline", "session", "tracking"},
    "serving": {
        "answer_forms",
        "embedding_endpoint",
        "health",
        "kserve_health",
        "model_language",
        "monitoring.live_page",
        "monitoring.metrics",
        "openai.answer_splitter",
        "openai.model_options",
        "openai.prompt_rows",
        "openai.requests",
        "openai.row_names",
        "openai.responses",
        "openai.row_files",
        "openai.row_forms",
        "openai.row_splitter",
        "openai.sampling_fields",
        "openai.schema",
        "profile_endpoint",
        "prompt_requests",
        "replica",
        "serve_options",
        "telemetry.otlp_logs",
        "telemetry.spans",
        "telemetry.telemetry",
    },
    "strategies": {"dynamic"},
    "text": {
        "answer_frames",
        "checkpoint",
        "checkpoint.built_in",
        "checkpoint.memory_estimate",
        "checkpoint.peft_adapter",
        "decoder",
        "decoder.open_decoder",
        "decoder.torch_decoder",
        "diffusion.unmasking_decoder",
        "diffusion.unmasking_plan",
        "generator",
        "generator.answer",
        "generator.draft_model",
        "generator.prompts",
        "generator.setup",
        "hub_cache",
        "hub_download",
        "language",
        "language.detokenizer",
        "language.grammar",
        "language.language",
        "language.list_trie",
        "language.list_walks",
        "language.tokenizer",
        "language.transformers_tokenizer",
        "language.vocabulary",
        "model",
        "model_listing",
        "multi_device",
        "packaged_download",
        "packaged_models",
        "precision",
        "sampling",
        "sampling.slot_settings",
        "stages.open_staged_decoder",
        "text_options",
        "transformer",
    },
    "workloads": {
        "selfplay.arena",
        "selfplay.arrays",
        "selfplay.bits",
        "selfplay.draw",
        "selfplay.game",
        "selfplay.games",
        "selfplay.kernels",
        "selfplay.playthrough",
        "selfplay.python_arena",
        "selfplay.python_game",
        "selfplay.rehearsal",
    },
}
ONLY_IN = {"typer": ["gpuinfer.cli"], "rich": ["gpuinfer.cli.screen.display", "gpuinfer.cli.screen.terminal_markdown"]}
HEAVY = {
    "torch": [
        "gpuinfer.datasets",
        "gpuinfer.lab.memory.rows_memory",  # which a child process alone imports
        "gpuinfer.lab.memory.text_memory",
        "gpuinfer.lab.memory.training_memory",
        "gpuinfer.models",
        "gpuinfer.text",
        "gpuinfer.workloads.optimizer",
    ],
    "numba": ["gpuinfer.workloads.selfplay", "gpuinfer.models", "gpuinfer.text"],
    "llguidance": [],
    "matplotlib": [],
    "mlflow": [],
    "opentelemetry": [],
    "prometheus_client": [],
    "ray": [],
    "tensorboard": [],
    "tomlkit": [],
    "uvloop": [],
    "wandb": [],
}


@cache
def modules() -> dict[str, ast.Module]:
    """All files, read when the first test asks: not by each process that collects the tests."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def imports(name: str) -> list[tuple[str, bool]]:
    """Each module or name that a file imports, and whether it is imported as soon as the file is."""
    return list(_imports(modules()[name]))


def _imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in lazy


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def inside(name: str, prefix: str) -> bool:
    return name == prefix or (prefix != "gpuinfer" and name.startswith(prefix + "."))


def part(name: str) -> str:
    """What a module belongs to: a folder of the package, or a file beside those folders."""
    return name.split(".")[1] if "." in name else "gpuinfer"


def imported(name: str, *, at_once: bool) -> set[str]:
    """The files that a file imports, at once or in a function too; a name stands for the file that it comes from."""
    found = {
        target if target in modules() else target.rpartition(".")[0]
        for target, now in imports(name)
        if now or not at_once
    }
    return {target for target in found if target in modules() and target != name}


def assert_no_circle(arrows: dict[str, set[str]]) -> None:
    done: dict[str, bool] = {}  # False while it is followed

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert done.get(name, True), f"a circle of imports: {' → '.join((*way[way.index(name) :], name))}"
        if name not in done:
            done[name] = False
            for target in sorted(arrows[name]):
                follow(target, (*way, name))
            done[name] = True

    for name in sorted(arrows):
        follow(name, ())


def test_no_part_imports_in_a_circle():
    arrows: dict[str, set[str]] = {part(name): set() for name in modules()}
    for name in modules():
        arrows[part(name)] |= {part(target) for target in imported(name, at_once=True)} - {part(name)}
    assert_no_circle(arrows)


def test_no_file_imports_in_a_circle():
    assert_no_circle({name: imported(name, at_once=True) for name in modules()})


def test_parts_import_one_another_by_their_facades():
    def behind(name):
        others = {target for target in imported(name, at_once=False) if part(target) != part(name)}
        for target in others:
            if target.count(".") > 1 and target.split(".", 2)[2] not in FACADES[part(target)]:
                yield target

    assert found_in_modules(behind) == {}


def test_a_facade_is_imported_by_others():
    needed = {target for name in modules() for target in imported(name, at_once=False) if part(target) != part(name)}
    listed = {f"gpuinfer.{owner}.{module}" for owner, names in FACADES.items() for module in names}
    assert listed - needed == set(), "what no other part imports any more is no facade"


def found_in_modules(faults_of):
    """What there is to say against each file, if anything. One test for all: so many small ones take ten seconds."""
    return {name: faults for name in modules() if (faults := list(faults_of(name)))}


def out_of_place(name, libraries, *, at_once):
    for library, places in libraries.items():
        if not any(inside(name, place) for place in places):
            yield from (target for target, now in imports(name) if inside(target, library) and (now or not at_once))


def test_a_library_for_the_screen_is_imported_in_its_place_only():
    assert found_in_modules(lambda name: out_of_place(name, ONLY_IN, at_once=False)) == {}


def test_heavy_libraries_are_imported_where_they_are_used():
    assert found_in_modules(lambda name: out_of_place(name, HEAVY, at_once=True)) == {}


def test_no_plugin_is_named_by_the_engine():
    plugins = ("gpuinfer.backends", "gpuinfer.strategies", "gpuinfer.workloads")
    for name in modules():
        if name.startswith("gpuinfer.engine"):
            assert not [target for target, _ in imports(name) if target.startswith(plugins)]


def test_a_workload_is_known_by_its_entry_point_alone():
    """But to the kit, which tries games with the engine that plays them, and to the face that takes a game's class."""
    for name in modules():
        if not name.startswith(("gpuinfer.workloads", "gpuinfer.testing", "gpuinfer.library.selfplay")):
            assert [target for target, _ in imports(name) if inside(target, "gpuinfer.workloads")] == [], name


FORBIDDEN = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
PICKLE_READER = "gpuinfer.text.checkpoint.pickle_reader"  # its unpickler imports nothing: docs/decisions/checkpoints.md


def test_nothing_is_unpickled():
    assert found_in_modules(unpickling) == {PICKLE_READER: ["pickle"]}


def unpickling(name):
    yield from (target for target, _ in imports(name) if target.split(".")[0] in FORBIDDEN)
    for node in ast.walk(modules()[name]):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        called = ast.unparse(node.func)
        if called in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
            yield called
        if called == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
            yield "np.load without allow_pickle=False"
        if node.func.attr == "recv" and "line" in called:
            yield f"{called} unpickles: use recv_bytes"


def test_the_page_on_architecture_has_every_part_and_names_only_files_that_are_there():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert [part for part in FACADES if f"| `{part}/` |" not in page] == []
    files = [path.as_posix() for path in PACKAGE.parent.rglob("*.py") if ".venv" not in path.parts]
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []


def test_comments_and_docstrings_name_files_that_exist():
    """`name.py` in backticks, anywhere in the package, is a file of this repository."""
    root = PACKAGE.parent
    folders = [root / name for name in ("gpuinfer", "tests", "plugins", "benchmarks", "tools", "examples", "one_file")]
    known = {path.name for folder in folders for path in folder.rglob("*.py")}
    gone = [
        f"{path.relative_to(root)}:{number}: {named}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for named in re.findall(r"`((?:\w+/)*\w+\.py)`", line)
        if named.rpartition("/")[2] not in known
    ]
    assert not gone, "these files have other names by now:\n" + "\n".join(gone)
