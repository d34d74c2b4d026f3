"""The report of a run in a few lines of words: what the final panel says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.cli.screen import node_rows, workload_rows
from gpuinfer.cli.screen.live_view import LEAST_SHARE, device_of, errors_of, on_cores, row_word, with_failed
from gpuinfer.cli.screen.workload_rows import PanelRow
from gpuinfer.report.causes_text import shortage
from gpuinfer.units import number, short, whole

LEAST_GAIN = 1.05  # as a factor: less is nothing to promise
FRAGMENTED = 0.1  # of what the allocator reserved: less is what any one leaves
MOST_OTHERS = 3  # processes that are named
UNFINISHED = 1.1  # times as many tokens as finished answers have: more, and it is said which are counted
LEAST_NODES_S = 3.0  # of a run over nodes: a shorter one has no times of cores
WAITED = 0.25  # of the time at work: less waiting for a core is what any machine has
FIRST_RATES = (
    *("games_per_min", "simulations_per_s", "evaluations_per_s"),
    *("output_tokens_per_s", "input_tokens_per_s", "cached_tokens_per_s"),
)
TIMES = {
    "latency_s": "latency",
    "queue_wait_s": "queue wait",
    "first_token_s": "first token",
    "between_tokens_s": "between tokens",
}


def panel_rows(report: Mapping[str, Any], trying_s: float | None = None) -> Iterator[PanelRow]:
    """The lines for a `gpuinfer.report/1`, most important first. Parts that the report leaves out are left out.

    `trying_s` is how long the trial of its advice takes, when that follows.
    """
    if progress := report.get("progress"):
        total = "" if progress["total"] is None else f" of {whole(progress['total'])}"
        yield PanelRow("finished", f"{whole(progress['done'])}{total} {progress['unit']}")
    rates = list(_throughput(report))
    nothing = "nothing was left to do" if _was_complete(report) else "nothing was finished"
    yield PanelRow("throughput", "\n".join(rates) or nothing, "strong")
    if _was_complete(report):
        yield from workload_rows.strength_rows(report.get("strength"))
        yield from workload_rows.resignation_rows(report.get("resignation"))
        yield from _records(report)
        return
    yield from workload_rows.strength_rows(report.get("strength"))
    yield from workload_rows.resignation_rows(report.get("resignation"))
    yield from workload_rows.rollouts_rows(report.get("rollouts"))
    yield from workload_rows.training_rows(report.get("training"))
    yield from node_rows.node_panel_rows(report.get("cluster"))
    yield from _batches(report.get("batches") or {})
    yield from _pages(report.get("pages") or {})
    yield from _unmasking(report.get("unmasking") or {})
    yield from _speculation(report.get("speculation") or {})
    if seen := report.get("stages"):  # of a model that is cut
        busy = ", ".join(f"{_layers(*stage['layers'])} {stage['busy_share']:.0%}" for stage in seen["stages"])
        micro = f"{whole(seen['micro_batches'])} micro-batches, {seen['bubble_share']:.0%} bubbles"
        yield PanelRow("stages", f"{seen['parallel']}, busy: {busy}; {micro}")
    for key, name in TIMES.items():
        values = report.get(key) or {}
        if any(values.values()):
            yield PanelRow(name, ", ".join(f"{what} {short(seconds)}" for what, seconds in values.items()))
    classes = report.get("classes") or {}
    for name, found in classes.items() if len(classes) > 1 else ():
        times = [f"{what} {short(found[what])}" for what in ("mean", "p95", "p99") if what in found]
        lost = errors_of(found.get("errors"))
        yield PanelRow(name, ", ".join([f"{whole(found['requests'])} answered", *times, *([lost] if lost else [])]))
    cores, device = report.get("cores"), report.get("device") or {}
    if report.get("cluster") and report["wall_s"] < LEAST_NODES_S:
        pass  # nodes report once a second, and so say nothing of a run that was shorter
    elif not cores or not cores["stations"] or device.get("reserved_mb"):
        if stations := _shares(report.get("time_s") or {}):
            yield PanelRow("time", stations)
    else:
        yield from _core_rows(cores)
    for index, line in enumerate(report.get("models") or ()):
        did = f"{whole(line['output_tokens'])} tokens" if line["output_tokens"] else f"{whole(line['rows'])} rows"
        waits = [("in the queue", (line["queue_wait_s"] or {}).get("mean")), ("for turns", line["turn_wait_s"])]
        waited = [f"{short(seconds)} {what}" for what, seconds in waits if seconds]
        parts = [
            did,
            f"{line['device_share']:.0%} of the device time",
            *(["waited " + ", ".join(waited)] if waited else []),
        ]
        yield PanelRow("" if index else "models", f"{line['name']}: {', '.join(parts)}")
    yield from _roofline(report.get("roofline") or {}, report.get("throughput") or {})
    bottleneck = report.get("bottleneck") or {}
    if bottleneck.get("class"):
        why = f": {bottleneck['why']}" if bottleneck.get("why") else ""
        yield PanelRow("bottleneck", f"{bottleneck['class']}{why}", "strong")
        if bottleneck.get("advice"):
            trial, predicted = bottleneck.get("trial"), _gain(bottleneck.get("gain") or {})
            words = [str(bottleneck["advice"])]
            if trial and bottleneck.get("command"):
                words.append(f"Tried{'' if trial['low'] > 1 else ' without a clear answer'}: {_measured(trial)}.")
            elif predicted and not trial:
                words.append(f"{_predicted(bottleneck, trying_s)}: {predicted}.")
            yield PanelRow("advice", " ".join(words))
        if bottleneck.get("command"):
            yield PanelRow("", str(bottleneck["command"]), "command")
        if trying_s is not None:
            yield PanelRow("", f"Trying it now, for about {trying_s:.0f} s. Ctrl-C skips that.")
    for notice in report.get("notices") or ():
        yield PanelRow("strategy", str(notice), "warning")
    if gone_on := report.get("fallback"):
        count = gone_on["processes"]
        where = f"{count} process{'es' if count > 1 else ''}"
        text = f"the server was gone: {gone_on['backend']} answered {whole(gone_on['rows'])} rows in {where}"
        yield PanelRow("fallback", f"{text}. {gone_on['why']}", "warning")
    failures = report.get("failures") or {}
    vain = report.get("errors") or {}
    if errors := errors_of(
        with_failed({**vain, "cancelled": 0} if report.get("status") == "partial" else vain, failures.get("count"))
    ):
        yield PanelRow("errors", errors, "bad")
    if first := failures.get("first"):
        yield PanelRow("the first", str(first), "bad")
    yield from _machine(report)
    yield from _records(report)


def in_brief(report: Mapping[str, Any]) -> str:
    """A run that has shown its answers, in one line; "" when there was none."""
    wall_s, rate = report["wall_s"], (report.get("throughput") or {}).get("output_tokens_per_s") or 0.0
    if not rate:
        return ""
    first = (report.get("first_token_s") or {}).get("p50")
    after = f", the first after {short(first)}" if first else ""
    return f"{whole(rate * wall_s)} tokens in {short(wall_s)}{after} · {number(rate)} tokens/s"


def _was_complete(report: Mapping[str, Any]) -> bool:
    """Whether all the work had been done before this run."""
    progress = report.get("progress") or {}
    return bool(progress.get("total")) and progress.get("before", 0) >= progress["total"]


def _throughput(report: Mapping[str, Any]) -> Iterator[str]:
    rates: Mapping[str, float | None] = report.get("throughput") or {}
    row = row_word((report.get("batches") or {}).get("slots") or 0)
    words = ["rows", "requests"] if rates.get("evaluations_per_s") else []  # the same again, in other words
    words += ["requests"] if rates.get("requests_per_s") == rates.get("rows_per_s") else []
    for name in sorted(rates, key=lambda name: FIRST_RATES.index(name) if name in FIRST_RATES else len(FIRST_RATES)):
        what, _, per = name.rpartition("_per_")
        rate = rates[name]
        if rate and what not in words:
            yield f"{number(rate)} {row if what == 'rows' else what.replace('_', ' ')}/{per}"


def _batches(batches: Mapping[str, Any]) -> Iterator[PanelRow]:
    if not batches.get("count"):
        return
    named = (("mean", "rows_mean"), ("median", "rows_p50"), ("most", "rows_max"))
    sizes = ", ".join(f"{name} {whole(batches[key])}" for name, key in named if batches.get(key) is not None)
    if slots := batches.get("slots"):
        used = f"{batches['occupancy']:.0%} of {whole(slots)} slots in use" if batches.get("occupancy") else ""
        yield PanelRow("steps", ", ".join(filter(None, [f"{whole(batches['count'])}, rows: {sizes}", used])))
        return  # what was admitted, and why, says little here
    yield PanelRow("batches", f"{whole(batches['count'])}, rows: {sizes}")
    if reasons := _shares(batches.get("reasons") or {}):
        yield PanelRow("cut because", reasons)


def _pages(found: Mapping[str, float]) -> Iterator[PanelRow]:
    """What it came to that pages of keys and values ran short, where they did."""
    if words := shortage(found):
        yield PanelRow("pages", f"ran short: {words}", "warning")


def _unmasking(found: Mapping[str, float]) -> Iterator[PanelRow]:
    """What came of a diffusion model's forwards: a row in a step is one."""
    if not found:
        return
    tokens = f"{found['tokens_per_forward']:.2g} useful tokens each"
    idle = f"{found['idle_share']:.0%} committed nothing" if found["idle_forwards"] else ""
    anew = f"{found['computed_share']:.0%} of positions computed anew"
    yield PanelRow("forwards", ", ".join(filter(None, [whole(found["forwards"]), tokens, idle, anew])))


def _speculation(found: Mapping[str, float]) -> Iterator[PanelRow]:
    """What came of tokens that were proposed to come next."""
    if found:
        drawn = f"{found['acceptance']:.0%} of {whole(found['proposed_tokens'])} proposed tokens accepted"
        each = f"{found['tokens_per_step']:.2f} tokens of a row in a step"
        yield PanelRow("speculation", f"{drawn}, {each}, about {found['gain']:.2f} times as fast as without")


def _layers(first: int, last: int) -> str:
    return f"layers {first} to {last}" if last > first else f"layer {first}"


def _roofline(roofline: Mapping[str, Any], rates: Mapping[str, float]) -> Iterator[PanelRow]:
    if not roofline:
        return
    if "least_s" in roofline:
        finished = rates.get("output_tokens_per_s") or 0.0
        what = "memory bandwidth" if roofline["limited_by"] == "memory" else "products"
        earlier = "; measured by an earlier run" if roofline["remembered"] else ""
        rate, computed = (
            f"{number(roofline['tokens_per_s'])} tokens/s",
            roofline["efficiency"] * roofline["tokens_per_s"],
        )
        if roofline["raised"]:
            yield PanelRow("roofline", f"this run: {rate}, more than what was measured of the machine allows", "strong")
        else:
            if computed > UNFINISHED * finished:
                rate = f"{number(computed)} of {rate}, with those of answers that are not finished"
            yield PanelRow(
                "roofline",
                f"{roofline['efficiency']:.0%} of what this machine can do with this model at "
                f"{whole(roofline['at_rows'])} rows ({rate}); limited by {what}{earlier}",
                "strong",
            )
        return
    best = f"{number(roofline['rows_per_s'])} rows/s at {whole(roofline['at_rows'])} rows, {roofline['arrangement']}"
    efficiency = roofline.get("efficiency")
    if roofline.get("raised"):
        most = max(roofline.get("measured") or (0.0,))
        words = f" where the bare model was measured to do {number(most)}" if most else ""
        yield PanelRow("roofline", f"this run: {number(roofline['rows_per_s'])} rows/s{words}", "strong")
        return
    yield PanelRow(
        "roofline", f"{best} (the bare model)" if efficiency is None else f"{efficiency:.0%} of {best}", "strong"
    )


def _predicted(bottleneck: Mapping[str, Any], trying_s: float | None) -> str:
    if trying_s is not None:
        return "Predicted"
    return f"Predicted, not tried ({why})" if (why := bottleneck.get("not_tried")) else "Predicted, not tried"


def trial_rows(bottleneck: Mapping[str, Any]) -> Iterator[PanelRow]:
    """What the trial of an advice brought, in lines that stand below those of the run."""
    trial = bottleneck.get("trial")
    if trial is None:
        yield PanelRow("not tried", f"{bottleneck['not_tried']}. What the advice brings stays a prediction.", "warning")
    elif not bottleneck.get("command"):
        yield PanelRow("tried", str(bottleneck["advice"]).removeprefix("Tried "), "strong")
    else:
        unclear = "" if trial["low"] > 1 else " No clear answer: what the advice brings stays a prediction."
        yield PanelRow("tried", f"{_measured(trial)}.{unclear}", "strong")
        yield PanelRow("", str(bottleneck["command"]), "command")


def _measured(trial: Mapping[str, Any]) -> str:
    times = f"{trial['measured']:.2f} times as fast ({trial['low']:.2f} to {trial['high']:.2f})"
    return f"{times}, {trial['turns']} turns of {trial['seconds']:.2g} s"


def _gain(gain: Mapping[str, float | None]) -> str:
    """What following the advice should bring, where it may bring anything."""
    low, high, expected = (gain.get(name) for name in ("low", "high", "expected"))
    if not low or not high or high < LEAST_GAIN:
        return ""
    if expected:
        return f"{expected:.1f} times as fast ({low:.1f} to {high:.1f})"
    return f"at most {high:.1f} times as fast"


def _machine(report: Mapping[str, Any]) -> Iterator[PanelRow]:
    memory = report.get("memory") or {}
    sizes = (("", memory.get("rss_peak_mb")), (" on the device", memory.get("device_peak_mb")))
    model = report.get("model") or {}
    if named := ", ".join(_model(model)):
        yield PanelRow("model", named)
    for name, other in (report.get("beside") or {}).items():
        yield PanelRow("beside", ", ".join(_model({**other, "model": name})))
    if held := ", ".join(f"{_bytes(size * 2**20)}{where}" for where, size in sizes if size):
        estimate = ""
        if estimated := model.get("estimated_bytes"):
            weights = model.get("estimated_weights_bytes")
            of_which = f" ({_bytes(weights)} of weights)" if weights else ""
            measured = model.get("measured_bytes")
            found = f", {_bytes(measured)} measured" if measured else ""
            estimate = f"; the model: {_bytes(estimated)} estimated{of_which}{found}"
        yield PanelRow("memory", f"{held} at most{estimate}")
    if (unfilled := memory.get("fragmentation") or 0.0) >= FRAGMENTED:
        yield PanelRow("", f"{unfilled:.0%} of what was reserved on the device was never filled")
    if named := ", ".join(device_of(report.get("device") or {})):
        yield PanelRow("device", named)
    if (hidden := (report.get("device") or {}).get("copies_hidden")) is not None:
        yield PanelRow("", f"{hidden:.0%} of the time of its copies hidden behind compute")
    for name, device in ((report.get("device") or {}).get("devices") or {}).items():
        yield PanelRow("", f"{name}: {_of_one(device)}")
    if others := (report.get("device") or {}).get("others"):
        theirs = sum(one["mb"] or 0.0 for one in others) * 2**20
        names = ", ".join(f"{one['name'] or 'unnamed'} (pid {one['pid']})" for one in others[:MOST_OTHERS])
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        yield PanelRow("", f"others hold {_bytes(theirs)} of it: {names}{more}", "warning")


def _of_one(device: Mapping[str, Any]) -> str:
    """What one of several devices has done."""
    text = f"{whole(device['rows'])} rows in {whole(device['batches'])} batches, busy {device['busy']:.0%}"
    if held := device.get("reserved_mb"):
        text += f", {_bytes(held * 2**20)}"
    return f"{text}; FAILED: {device['failed']}" if device["failed"] else text


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    """What it is called, and how much it takes at once."""
    if name := model.get("model"):
        yield str(name)
    if slots := model.get("slots"):
        yield f"{whole(slots)} slots" + (f" of {whole(model['context'])} tokens" if model.get("context") else "")


def _bytes(count: float) -> str:
    return f"{number(count)}B"


def _records(report: Mapping[str, Any]) -> Iterator[PanelRow]:
    options = (report.get("settings") or {}).get(report.get("workload"))
    names = options if isinstance(options, Mapping) else {}
    out, answers = names.get("out"), names.get("output") if names.get("output") != "-" else None
    for name, place in (("records", out), ("answers", answers)):
        if place:
            yield PanelRow(name, str(place), "command")
    if report.get("status") == "partial":
        cure = " The same command with --resume goes on." if "resume" in names and (out or answers) else ""
        begun = (report.get("errors") or {}).get("cancelled", 0)
        asked = f": {whole(begun)} request{'' if begun == 1 else 's'} under way or waiting" if begun else ""
        yield PanelRow("", f"Stopped with work left{asked}.{cure}", "warning")


def _core_rows(cores: Mapping[str, Any]) -> Iterator[PanelRow]:
    """None of what was not measured."""
    stations = _shares(on_cores(cores))
    if not stations or not cores["busy_s"]:
        return
    count = cores["count"]
    of = f"of {count} cores" if count > 1 else "of one core"
    yield PanelRow("time", f"{of}: {stations}" if cores["idle_s"] is not None else stations)
    if cores["waiting_s"] > WAITED * cores["busy_s"]:
        waiting = cores["waiting_s"] / (cores["waiting_s"] + cores["busy_s"])
        yield PanelRow("", f"threads that were ready to run waited for a core {waiting:.0%} of their time")


def _shares(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / total:.0%}" for name, part in ordered if total and part / total >= LEAST_SHARE)
