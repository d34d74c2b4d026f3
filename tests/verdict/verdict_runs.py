"""Constructed runs, and which verdict each of them gets: class, a number of its evidence, what the command adds."""

from __future__ import annotations

from dataclasses import replace

from gpuinfer.api import Roofline
from gpuinfer.report.evidence import Evidence

ROOFLINE = Roofline(10_000.0, 512, "2 forwards × 1 thread")
OPTIONS = {
    "-B": {"max_rows": 64, "threads": 8, "in_flight": 1},
    "-S": {"max_wait": 0.01, "max_rows": None},
    "--": {"workers": None, "games_in_flight": 64, "dtype": "float32"},
}


def lane(name, **stations):
    """A lane of a run of 10 seconds, with a visit for each 10 ms of work; the rest of the time it was idle."""
    visits = {station: round(seconds * 100) for station, seconds in stations.items()}
    return {"name": name, "stations": {**stations, "idle": 10.0 - sum(stations.values())}, "visits": visits}


def rows_run(*lanes, **more):
    """Ten seconds of self-play on four cores."""
    plain = {"wall_s": 10.0, "rows_per_s": 5000.0, "rows_mean": 512.0, "cores": 4, "command": "gpuinfer selfplay"}
    return Evidence(**{**plain, "options": OPTIONS, "lanes": lanes, **more})


HALF_BUSY = (lane("search 0", search=4.0), lane("forward 0", forward=4.0))
FULL_LANES = (lane("search 0", search=2.0), lane("forward 0", forward=9.5))


def workers(search, forward):
    """The lanes of two workers that compute by themselves."""
    each = [(f"worker {n}: search", f"worker {n}: forward 0") for n in range(2)]
    return [one for names in each for one in (lane(names[0], search=search), lane(names[1], forward=forward))]


TWO_WORKERS, SHARED = workers(4.0, 5.0), workers(3.0, 7.0)
FACTS = {"workers": 2, "blocks": 2, "rows_outstanding": 384, "games_in_flight": 64}
CLIENTS = {"clients": 8}
SMALL = {
    "cores": 2, "cpu_s": 19.0, "cpu_wait_s": 12.0, "roofline": Roofline(120_000.0, 512, "2 × 1 thread"),
    "requests": 7000, "rows_per_s": 5600.0, "rows_mean": 8.0, "batch_s": {8: (7000, 13.0)},
    "facts": {"workers": 2, "blocks": 2, "rows_outstanding": 384, "games_in_flight": 128},
    "options": {"-B": {"threads": 1, "max_rows": 8}, "-S": {"max_rows": None}, "--": {"games_in_flight": 128}},
}  # fmt: skip
NEIGHBOUR = {"others_cores": 1.1, "cpu_s": 9.0, "cpu_wait_s": 20.0}
STAGED = {
    "parallel": "pipeline", "active_share": 0.95, "bubble_share": 0.2, "fits_one": True,
    "stages": [{"layers": [0, 3], "busy_share": 0.9}, {"layers": [4, 7], "busy_share": 0.62}],
}  # fmt: skip
CUT = {
    "lanes": (lane("worker 0: search", search=2.0), lane("worker 0: forward 0", stages=9.5),
              lane("worker 0: stage 0", forward=9.0), lane("worker 0: stage 1", forward=6.2)),
    "options": {"-B": {"parallel": "layers", "stages": 2}, "-S": {}, "--": {}},
    "command": "gpuinfer selfplay -B stages=2 -B parallel=pipeline",
}  # fmt: skip

ROWS = {
    "a pipeline, where whole models have room on the same cores": rows_run(**CUT, staged=STAGED, roofline=ROOFLINE),
    "layers of a model that fits on no device": rows_run(
        **CUT, staged={**STAGED, "parallel": "layers", "fits_one": False}, on_cpu=False
    ),
    "a pipeline of a model that fits on no device": rows_run(**CUT, staged={**STAGED, "fits_one": False}, on_cpu=False),
    "a cap, where search and model share the cores and take turns": rows_run(
        *SHARED, **{**SMALL, "reasons": {"full": 99, "clients": 1}}
    ),
    "a cap, and a neighbour on the cores": rows_run(
        *SHARED, **{**SMALL, **NEIGHBOUR, "reasons": {"full": 99, "clients": 1}}
    ),
    "few games in flight, where search and model share the cores": rows_run(
        *SHARED, **{**SMALL, "facts": {"workers": 2, "blocks": 2, "rows_outstanding": 24, "games_in_flight": 8}}
    ),
    "a neighbour on the cores, and nothing else": rows_run(
        *SHARED, **{**SMALL, **NEIGHBOUR, "rows_mean": 512.0, "batch_s": {512: (100, 13.0)}}
    ),
    "at the roofline": rows_run(*HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE),
    "at the roofline in bfloat16 already": rows_run(*HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE, dtype="bfloat16"),
    "at the roofline of a processor without bfloat16": rows_run(
        *HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE, bfloat16_pays=False
    ),
    "forward lanes without a pause, no roofline known": rows_run(
        lane("search", search=1.0), lane("forward 0", forward=9.5), on_cpu=False, dtype="bfloat16"
    ),
    "two busy forward lanes on a device that they leave idle": rows_run(
        lane("search", search=4.0),
        *(lane(f"forward {number}", forward=4.1, transfer=3.3, reply=0.9, idle=1.7) for number in range(2)),
        on_cpu=False,
        dtype="bfloat16",
        cores=16,
    ),
    "the numbers do not add up": rows_run(lane("search", search=5.0), lane("forward 0", forward=3.0, other=2.0)),
    "all that is offered is answered": rows_run(
        lane("forward 0", forward=3.0), rows_per_s=990.0, facts={"offered_rows_per_s": 1000.0}
    ),
    "idle lanes and clients that nobody knows": rows_run(
        lane("forward 0", forward=3.0), requests=500, latency_s=0.011, queue_wait_s=0.001
    ),
    "batches wait for a timer": rows_run(
        lane("search", search=5.0),
        lane("forward 0", forward=5.0),
        reasons={"waited": 8, "full": 2},
        latency_s=0.02,
        queue_wait_s=0.01,
    ),
    "too few rows can be outstanding, with the arithmetic": rows_run(
        *FULL_LANES,
        rows_mean=96.0,
        roofline=ROOFLINE,
        facts=FACTS,
        rows_per_s=3000.0,
        requests=312,
        batch_s={96: (312, 9.5)},
    ),
    "too few rows, and no more games to play": rows_run(
        *TWO_WORKERS, rows_mean=96.0, roofline=ROOFLINE, facts=FACTS, total=64
    ),
    "search and forward take turns": rows_run(*HALF_BUSY, facts={"workers": 1, "games_in_flight": 64}),
    "the backend's cap keeps batches small": rows_run(
        *FULL_LANES,
        rows_mean=64.0,
        roofline=ROOFLINE,
        facts={"rows_outstanding": 4096},
        requests=500,
        rows_per_s=3200.0,
        reasons={"full": 9, "clients": 1},
        batch_s={64: (500, 9.5)},
    ),
    "the strategy's cap keeps batches small": rows_run(
        *FULL_LANES,
        rows_mean=64.0,
        roofline=ROOFLINE,
        facts={"rows_outstanding": 4096},
        requests=500,
        rows_per_s=3200.0,
        reasons={"cap": 9, "clients": 1},
        batch_s={64: (500, 9.5)},
    ),
    "moving takes longer than computing": rows_run(
        lane("search", search=2.0), lane("forward 0", forward=3.0, transfer=6.0), on_cpu=False
    ),
    "moving takes longer although it overlaps": rows_run(
        lane("forward 0", forward=3.0, transfer=6.0), lane("forward 1", forward=3.0, transfer=6.0), on_cpu=False
    ),
    "more busy workers than cores": rows_run(
        *(lane(f"worker {n}: search", search=9.5) for n in range(4)), cores=2, facts={"workers": 4}
    ),
    "forwards of too many threads, by the ledger": rows_run(
        lane("search", search=1.0), lane("forward 0", forward=9.0), facts={"threads": 8}
    ),
    "forwards of too many threads, by what the system tells": rows_run(
        lane("search", search=1.0), lane("forward 0", forward=9.0), cpu_s=39.0, cpu_wait_s=39.0
    ),
    "one worker holds the others up": rows_run(
        lane("worker 0: search", search=9.5),
        *(lane(f"worker {n}: search", search=3.0) for n in (1, 2, 3)),
        lane("forward 0", forward=4.0),
        facts={"workers": 4},
    ),
    "the model waits for the search, and cores are free": rows_run(
        lane("search", search=9.5), lane("forward 0", forward=2.0), facts={"workers": 1}
    ),
    "a search without a model on all cores": rows_run(
        *(lane(f"search {n}", search=9.9) for n in range(4)), facts={"workers": 4}
    ),
    "the workers do something other than searching": rows_run(
        lane("worker 0: client", encode=9.0, search=0.5), lane("forward 0", forward=2.0), facts={"workers": 1}
    ),
    "clients think for longer than they wait": rows_run(
        lane("forward 0", forward=2.0), requests=1000, facts=CLIENTS, latency_s=0.01, batch_s={64: (1000, 2.0)}
    ),
    "search and model share full cores, and the model takes most": rows_run(
        *(lane(f"w{n}", search=2.4) for n in range(2)),
        *(lane(f"forward {n}", forward=7.4) for n in range(2)),
        cores=2,
        dtype="bfloat16",
        roofline=ROOFLINE,
        rows_per_s=7400.0,
    ),
    "everybody waits for something that is not here": rows_run(
        lane("reader", search=0.5), lane("forward 0", forward=0.1)
    ),
    "nothing ran": rows_run(),
    "no rows, while others had the cores": rows_run(
        lane("forward 0", forward=0.1), rows_per_s=0.0, total=0, others_cores=3.9, cpu_s=0.1, cpu_wait_s=3.0
    ),
}

# Models with slots

COMMAND = "gpuinfer generate --input p.jsonl"
BUSY = {"prefill": 1.0, "forward": 8.5, "sample": 0.3, "reply": 0.2}


def steps(*sizes):
    """Of (rows, how many, seconds of each)."""
    return {rows: [count, count * seconds] for rows, count, seconds in sizes}


FULL = steps((64, 900, 0.011))
SUBLINEAR = steps((16, 100, 0.004), (32, 100, 0.005), (64, 800, 0.010))  # with 128 rows it would be 0.020
FLAT = steps((8, 100, 0.010), (32, 100, 0.010), (64, 800, 0.0105))


def a_lane(name, **stations):
    return {**lane(name, **stations), "visits": {}}


def slots_run(stations=BUSY, **more):
    """Ten seconds of a model with 64 slots, 400 rows answered, most of which had waited."""
    plain = {
        "wall_s": 10.0,
        "lanes": [a_lane("forward 0", **stations)],
        "slots": 64,
        "requests": 400,
        "rows_per_s": 40.0,
        "batch_s": FULL,
        "reasons": {"full": 300, "free": 1},
        "latency_s": 5.0,
        "queue_wait_s": 3.5,
        "facts": {"rows_outstanding": 192},
        "cores": 2,
        "cpu_s": 19.0,
        "dtype": "bfloat16",
        "options": {"-B": {"slots": 2, "threads": 2}, "--": {"batch_size": 2, "context": None, "dtype": "float32"}},
        "command": COMMAND,
    }
    return Evidence(**{**plain, **more})


def waiting(*lanes, **more):
    """A model that has nothing to do for 45 % of the time, beside these lanes."""
    run = slots_run({**BUSY, "forward": 4.0}, cpu_s=12.0, **more)
    return replace(run, lanes=[*run.lanes, *lanes])


GENERATION = {
    "the model computes all the time": slots_run(dtype="float32"),
    "in bfloat16 already": slots_run(),
    "on a processor without bfloat16": slots_run(dtype="float32", bfloat16_pays=False),
    "larger steps would take longer by as much": slots_run(batch_s=SUBLINEAR),
    "steps take as long with more rows": slots_run(batch_s=FLAT),
    "a workload without a flag for it": slots_run(batch_s=FLAT, options={"-B": {"slots": 64}}),
    "a single slot": slots_run(slots=1, batch_s=steps((1, 2000, 0.005))),
    "more slots than there are rows for": slots_run(batch_s=FLAT, requests=100, rows_per_s=10.0),
    "sampling takes long": slots_run({**BUSY, "forward": 4.0, "sample": 4.5}),
    "the work between steps takes long": slots_run({**BUSY, "forward": 4.0, "reply": 4.5}),
    "rows come slowly": slots_run({**BUSY, "forward": 4.0}, cpu_s=12.0),
    "slow standard input": waiting(a_lane("input", read=9.0, understand=0.2), a_lane("output", write=0.1, sync=0.4)),
    "two rows of standard input": waiting(a_lane("input", read=9.0), requests=2, rows_per_s=0.2),
    "prompts that are hard to read, in two lanes": waiting(
        a_lane("input", understand=2.5), a_lane("prompts 0", understand=3.0, constrain=0.2)
    ),
    "a heavy schema for each row": waiting(
        a_lane("input", understand=0.5), a_lane("prompts 0", understand=0.5, constrain=4.0)
    ),
    "slow standard output": waiting(a_lane("input", read=0.2), a_lane("output", write=8.0, sync=0.5)),
    "a slow fsync": waiting(a_lane("input", read=0.2), a_lane("output", write=0.3, sync=6.0)),
    "nothing beside the model was busy for as long": waiting(
        a_lane("input", read=1.0), a_lane("output", write=0.3, sync=0.5)
    ),
    "a heavy schema for all rows": slots_run({**BUSY, "forward": 4.0, "constrain": 4.5}),
    "prompts in small pieces": slots_run(
        {**BUSY, "prefill": 6.0, "forward": 3.5},
        batch_s=steps((6, 900, 0.01)),
        steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 18000},
        options={"-B": {"step_tokens": 4}},
    ),
    "very long prompts": slots_run(
        {**BUSY, "prefill": 9.0, "forward": 0.5},
        batch_s=steps((3, 900, 0.01)),
        queue_wait_s=0.0,
        steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 700000},
        options={"-B": {"step_tokens": 512}},
    ),
    "very long prompts with log-probabilities": slots_run(
        {**BUSY, "prefill": 9.0, "forward": 0.5},
        batch_s=steps((3, 900, 0.01)),
        steps={"seconds": 9.0, "held_s": 8.1, "echoing_s": 8.1, "prompt_tokens": 700000},
    ),
    "whole canvases of few rows fill the steps": slots_run(
        batch_s=steps((12, 90, 0.1)), steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 700}
    ),
    "slots: a neighbour on the cores, and nothing else": slots_run(others_cores=1.1, cpu_s=9.0, cpu_wait_s=9.0),
    "prompts in small pieces, and a neighbour on the cores": slots_run(
        {**BUSY, "prefill": 6.0, "forward": 3.5},
        steps={"seconds": 9.0, "held_s": 8.1},
        options={"-B": {"step_tokens": 4}},
        others_cores=1.1,
        cpu_s=9.0,
        cpu_wait_s=9.0,
    ),
    "two rows": slots_run(batch_s=steps((1, 80, 0.1), (2, 10, 0.1)), requests=2, rows_per_s=0.2, queue_wait_s=0.0),
    "a long end": slots_run(batch_s=steps((3, 500, 0.01), (64, 400, 0.01))),
    "long prompts, a few to a step": slots_run(
        {**BUSY, "prefill": 8.0, "forward": 1.5}, batch_s=steps((3, 900, 0.011))
    ),
    "rows that are asked too slowly": slots_run(batch_s=steps((16, 900, 0.01)), queue_wait_s=0.01),
    "a few steps": slots_run({"prefill": 0.2}, batch_s=steps((2, 3, 0.07)), requests=2, rows_per_s=0.2),
    "no step at all": slots_run(batch_s={}, requests=0, rows_per_s=0.0),
    "others have the cores": slots_run(cpu_s=3.0, cpu_wait_s=60.0),
}

# Text on the cores

NOTHING_ASKED = {f"with_{name}": 0 for name in ("constraints", "lists", "stop", "logprobs", "penalties")}
TEXT_OPTIONS = {"-B": {"slots": 64, "threads": 2}, "--": {"batch_size": 64, "dtype": "bfloat16", "temperature": 1.0}}
ONE_THREAD = {**TEXT_OPTIONS, "-B": {"slots": 64, "threads": 1}}
WORK = {**NOTHING_ASKED, "flops": 900e9, "prefill_flops": 100e9, "bytes": 30e9, "prefill_bytes": 1e9}


def a_roofline(efficiency, **more):
    plain = {"tokens_per_s": 1000.0, "at_rows": 64, "least_s": 10.0 * efficiency, "gflops_per_s": 200.0}
    plain |= {"own_gflops_per_s": 200.0, "gbytes_per_s": 20.0, "efficiency": efficiency, "limited_by": "products"}
    return {**plain, **more}


def text_run(stations=BUSY, **more):
    """Full slots and full cores; prompts that asked for nothing beside tokens."""
    return slots_run(stations, **{"options": TEXT_OPTIONS, "steps": WORK, "batch_s": SUBLINEAR, **more})


SHORT_OF_PAGES = {
    "slots": 8,
    "batch_s": steps((3, 900, 0.01)),
    "steps": {**WORK, "waited_rows": 158, "preempted_rows": 133, "recomputed_tokens": 2261},
    "pages_given": True,
    "model": {"pages": 8, "context": 128, "page_positions": 32, "cache_bytes": 16 << 20},
    "options": {**TEXT_OPTIONS, "-B": {"slots": 8, "pages": 8, "threads": 2}},
}
TEXT = {
    "fewer threads than cores": text_run(cpu_s=10.0, options=ONE_THREAD),
    "a shape that leaves a core idle": text_run(cpu_s=10.0, model={"decoder_threads": 1}),
    "a step's serial part": text_run({**BUSY, "forward": 6.5, "sample": 2.3}, cpu_s=16.0, unused_cores=0.4),
    "threads that wait for one another, actively": text_run(
        cpu_s=19.0, steps={**WORK, "threads_busy_s": 12.0, "threads_waited_s": 7.0}, unused_cores=0.05
    ),
    "idle cores that nothing explains": text_run(unused_cores=0.9, cpu_s=11.0),
    "first touch of memory": text_run({**BUSY, "forward": 4.5, "first touch": 4.0}, steps={**WORK, "faults": 3500}),
    "kernels are compiled in the midst of a run": text_run({"prefill": 1.0, "forward": 3.0, "compile": 5.5}),
    "memory gives no more": text_run(steps={**WORK, "bytes": 141e9}, text_roofline=a_roofline(0.7)),
    "memory gave less when it was measured": text_run(steps={**WORK, "bytes": 300e9}, text_roofline=a_roofline(0.7)),
    "memory gives no more, of weights that could be smaller": text_run(
        steps={**WORK, "bytes": 141e9},
        text_roofline=a_roofline(0.7),
        dtype="float32",
        bfloat16_pays=False,
        options={**TEXT_OPTIONS, "--": {"dtype": "float32"}},
    ),
    "products are slow": text_run(text_roofline=a_roofline(0.4, own_gflops_per_s=80.0)),
    "attention takes long": text_run(text_roofline=a_roofline(0.4), steps={**WORK, "attention_flops": 200e9}),
    "what is between products takes long": text_run(text_roofline=a_roofline(0.5)),
    "sampling takes more than anything else": text_run(
        {**BUSY, "forward": 5.7, "sample": 2.8, "reply": 0.4}, text_roofline=a_roofline(0.55)
    ),
    "near the roofline": text_run(text_roofline=a_roofline(0.85)),
    "three prompts beside other programs": text_run(
        requests=3, rows_per_s=0.8, wall_s=4.0, others_cores=1.2, cpu_s=4.0, cpu_wait_s=3.0
    ),
    "three prompts": text_run(batch_s=steps((3, 100, 0.09)), requests=3, rows_per_s=0.3, queue_wait_s=0.0),
    "one row": text_run(
        batch_s=steps((1, 900, 0.01)),
        requests=1,
        rows_per_s=0.1,
        queue_wait_s=0.0,
        steps={**WORK, "bytes": 120e9},
        text_roofline=a_roofline(0.7),
    ),
    "few rows, stopped before most were answered": text_run(
        batch_s=steps((37, 100, 0.09)), requests=13, rows_per_s=1.3, cancelled=28, queue_wait_s=0.0
    ),
    "stopped before its slots were full for long": text_run(
        batch_s=steps((37, 100, 0.09)), requests=13, rows_per_s=1.3, cancelled=90
    ),
    "fewer pages than rows need": text_run(**SHORT_OF_PAGES),
    "fewer pages than the rows need that may be there at once": text_run(
        **{**SHORT_OF_PAGES, "slots": 4, "batch_s": steps((2, 900, 0.01))}
    ),
    "fewer pages than rows need, as memory has no room for more": text_run(**{**SHORT_OF_PAGES, "pages_given": False}),
    "prompts above all, on all cores": text_run({"prefill": 9.0, "forward": 0.6}, batch_s=steps((60, 900, 0.01))),
    "prompts above all, on one core of two": text_run(
        {"prefill": 9.0, "forward": 0.6}, batch_s=steps((60, 900, 0.01)), unused_cores=0.9, cpu_s=11.0
    ),
}

# Diffusion models

CANVAS, ANSWER, BLOCK, ANSWERED = 512, 256, 32, 200
FLAGS = ("decoder", "threshold", "steps", "block_length", "cache")


def counted(tokens_per_forward, computed_share, useful=1.0, idle=0):
    """Of 200 answers of 256 tokens on canvases of 512, `useful` of them before an end."""
    forwards = ANSWERED * ANSWER / tokens_per_forward
    positions = forwards * CANVAS
    return {
        "steps": forwards / 16,
        "seconds": 9.0,
        "rows": forwards,
        "positions": positions,
        "tokens": positions * computed_share,
        "committed": ANSWERED * ANSWER,
        "output_tokens": ANSWERED * ANSWER * useful,
        "idle": idle,
    }


def masks_run(steps, stations=None, model=None, /, **flags):
    """Ten seconds of a model with 16 slots that were full."""
    each = round(steps["steps"])
    return slots_run(
        stations or {"forward": 9.3, "sample": 0.3, "reply": 0.2},
        slots=16,
        requests=ANSWERED,
        rows_per_s=ANSWERED / 10,
        batch_s={8: [each // 10, 0.5], 16: [each, 8.5]},
        steps=steps,
        model={"decoder": "low-confidence", "cache": "none", "block": None, "block_causal": False, **(model or {})},
        reasons={},
        facts={},
        options={
            "-B": {"slots": 16},
            "--": {**dict.fromkeys(FLAGS), "batch_size": 16, "block_length": BLOCK, **flags},
        },
    )


CAUSAL = {"block_causal": True, "block": 32}
MASKS = {
    "whole canvases, no cache": masks_run(counted(4.0, 1.0), decoder="threshold", threshold=0.9),
    "no cache, block-causal": masks_run(counted(4.0, 1.0), None, CAUSAL, decoder="threshold", cache="none"),
    "a token a forward: the model's own schedule": masks_run(counted(1.2, 0.1), cache="dual"),
    "a schedule of many steps": masks_run(counted(1.2, 0.1), cache="dual", decoder="random", steps=200),
    "a threshold that is hardly reached": masks_run(
        counted(1.2, 0.1), cache="dual", decoder="threshold", threshold=0.99
    ),
    "forwards that committed nothing": masks_run(counted(1.2, 0.1, idle=4_267), cache="dual"),
    "several tokens, cached": masks_run(counted(6.0, 0.2), cache="dual", decoder="threshold", threshold=0.9),
    "an unsure model": masks_run(counted(1.2, 0.1), cache="dual", decoder="threshold", threshold=0.8),
    "a decoder of a plugin": masks_run(counted(1.2, 0.1), cache="vicinity", decoder="someone-elses"),
    "blocks as long as canvases": replace(
        masks_run(counted(8.0, 1.0), decoder="threshold", block_length=None), requests=ANSWERED // 16
    ),
    "masks that come slowly": masks_run(counted(1.0, 1.0), {"forward": 5.0, "sample": 0.2, "reply": 0.2}),
    "masks: drawing takes long": masks_run(counted(1.0, 1.0), {"forward": 5.0, "sample": 4.5}),
    "masks: answers take long": masks_run(counted(1.0, 1.0), {"forward": 5.0, "reply": 4.5}),
    "left to right: no canvas": masks_run({**counted(1.0, 1.0), "positions": 0}),
}

RUNS = {**ROWS, **GENERATION, **TEXT, **MASKS}
EXPECTED = """
a pipeline, where whole models have room on the same cores | pipeline bubbles | 2 | -B parallel=data
layers of a model that fits on no device | pipeline bubbles |  | -B parallel=pipeline
a pipeline of a model that fits on no device | pipeline bubbles | 20% |
a cap, where search and model share the cores and take turns | batch cap too small | 99% | -B max_rows=512
a cap, and a neighbour on the cores | batch cap too small | 1.1 | -B max_rows=512
few games in flight, where search and model share the cores | too few rows outstanding | 2 | --games-in-flight 214
a neighbour on the cores, and nothing else | oversubscribed CPUs | 1.1 |
at the roofline | device-saturated | 95% | --dtype bfloat16
at the roofline in bfloat16 already | device-saturated | 10,000 |
at the roofline of a processor without bfloat16 | device-saturated | 95% |
forward lanes without a pause, no roofline known | device-saturated | 95% |
two busy forward lanes on a device that they leave idle | transfer-bound | 82% | -B in_flight=3
the numbers do not add up | inconclusive | 10% |
all that is offered is answered | arrival-bound | 1,000 |
idle lanes and clients that nobody knows | arrival-bound | 70% |
batches wait for a timer | timer-bound | 10.0 | -S max_wait=0
too few rows can be outstanding, with the arithmetic | too few rows outstanding | 2 | --games-in-flight 280
too few rows, and no more games to play | too few rows outstanding | 384 |
search and forward take turns | too few rows outstanding |  | --games-in-flight 128
the backend's cap keeps batches small | batch cap too small | 64 | -B max_rows=512
the strategy's cap keeps batches small | batch cap too small |  | -S max_rows=512
moving takes longer than computing | transfer-bound | 6.0 | -B in_flight=2
moving takes longer although it overlaps | transfer-bound | 12.0 |
more busy workers than cores | oversubscribed CPUs | 3.8 | --workers 2
forwards of too many threads, by the ledger | oversubscribed CPUs | 7.3 | -B threads=4
forwards of too many threads, by what the system tells | oversubscribed CPUs | 7.8 | -B threads=4
one worker holds the others up | imbalance between workers | 0 |
the model waits for the search, and cores are free | search-bound | 95% | --workers 3
a search without a model on all cores | search-bound |  |
the workers do something other than searching | client-bound |  | --workers 3
clients think for longer than they wait | client-bound | 70.0 |
search and model share full cores, and the model takes most | device-saturated | 2.0 |
everybody waits for something that is not here | inconclusive |  |
nothing ran | inconclusive |  |
no rows, while others had the cores | inconclusive |  |

the model computes all the time | device-saturated | 100% | --dtype bfloat16
in bfloat16 already | device-saturated | 100% |
on a processor without bfloat16 | device-saturated | 100% |
larger steps would take longer by as much | device-saturated | 64 |
steps take as long with more rows | batch cap too small |  | --batch-size 128
a workload without a flag for it | batch cap too small |  | -B slots=128
a single slot | batch cap too small |  | --batch-size 16
more slots than there are rows for | device-saturated |  |
sampling takes long | sampling-bound | 45% |
the work between steps takes long | host-bound | 45% |
rows come slowly | host-bound | 45% |
slow standard input | host-bound | 45% |
two rows of standard input | inconclusive | 45% |
prompts that are hard to read, in two lanes | host-bound | 55% |
a heavy schema for each row | host-bound |  |
slow standard output | host-bound | 80% |
a slow fsync | host-bound |  |
nothing beside the model was busy for as long | host-bound |  |
a heavy schema for all rows | host-bound | 45% |
prompts in small pieces | batch cap too small | 4 | -B step_tokens=512
very long prompts | device-saturated | 90% |
very long prompts with log-probabilities | device-saturated |  |
whole canvases of few rows fill the steps | device-saturated | 12.0 |
slots: a neighbour on the cores, and nothing else | oversubscribed CPUs | 1.1 |
prompts in small pieces, and a neighbour on the cores | batch cap too small | 1.1 | -B step_tokens=512
two rows | too few rows outstanding | 2 |
a long end | too few rows outstanding | 30.1 |
long prompts, a few to a step | device-saturated | 5% |
rows that are asked too slowly | too few rows outstanding | 16.0 |
a few steps | inconclusive | 3 |
no step at all | inconclusive | 0 |
others have the cores | oversubscribed CPUs |  |

fewer threads than cores | idle cores | 1.0 | -B threads=2
a shape that leaves a core idle | idle cores | 1 |
a step's serial part | idle cores | 25% | --batch-size 128
threads that wait for one another, actively | idle cores | 0.8 | --batch-size 128
idle cores that nothing explains | idle cores | 0.9 | --batch-size 128
first touch of memory | first touch | 40% |
kernels are compiled in the midst of a run | cold start | 55% |
memory gives no more | memory bandwidth | 82% |
memory gave less when it was measured | memory bandwidth | 20 |
memory gives no more, of weights that could be smaller | memory bandwidth | 82% | --dtype bfloat16
products are slow | below the roofline | 40% |
attention takes long | below the roofline | 50% |
what is between products takes long | below the roofline | 40% |
sampling takes more than anything else | below the roofline | 28% |
near the roofline | device-saturated | 85% |
three prompts beside other programs | inconclusive | 3 |
three prompts | too few rows outstanding | 3 |
one row | too few rows outstanding | 70% |
few rows, stopped before most were answered | too few rows outstanding | 41 |
stopped before its slots were full for long | inconclusive | 90 |
fewer pages than rows need | too few pages | 158 | -B pages=256
fewer pages than the rows need that may be there at once | too few pages | 2.0 | -B pages=16
fewer pages than rows need, as memory has no room for more | too few pages |  |
prompts above all, on all cores | device-saturated | 90% |
prompts above all, on one core of two | idle cores | 0.9 |

whole canvases, no cache | recomputation | 12,800 | --cache dual
no cache, block-causal | recomputation | 12,800 | --cache exact
a token a forward: the model's own schedule | few tokens a forward | 42,667 | --decoder threshold
a schedule of many steps | few tokens a forward | 200 | --decoder threshold
a threshold that is hardly reached | few tokens a forward | 0.99 | --threshold 0.9
forwards that committed nothing | few tokens a forward | 10% | --decoder threshold
several tokens, cached | device-saturated
an unsure model | device-saturated
a decoder of a plugin | device-saturated
blocks as long as canvases | device-saturated
masks that come slowly | host-bound
masks: drawing takes long | sampling-bound
masks: answers take long | host-bound
left to right: no canvas | device-saturated
"""
