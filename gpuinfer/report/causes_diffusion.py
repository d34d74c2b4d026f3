"""Causes of a masked diffusion model that computes all the time: few tokens a forward, or positions that a cache would
keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.report import thresholds
from gpuinfer.report.causes_text import forward_share
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.forecast import Gain, RunCase, Verdict
from gpuinfer.stats import DiffusionCounters

SCHEDULED = frozenset({"low-confidence", "random", "dream"})  # commit as many as the schedule says, sure or not
CONFIDENT = {"threshold": 0.9, "hierarchical": 0.9, "credit": 0.9, "smoothing": 0.9, "block-refinement": 0.9}
"""Decoder → the threshold from which lower ones are the trade that papers make (Wu et al. 2025, "Fast-dLLM")."""
CAUTION = "`gpuinfer verify` with it tells how many tokens differ."


def recomputation(case: RunCase) -> Verdict | None:
    """Whole canvases are computed in every step, of which only a block changes."""
    run, found = case.run, _model_bound(case.run)
    if found is None or run.steps.get("positions", 0) <= 0:
        return None
    cache = _in_force(run, "cache") or "none"  # the one that keeps more than the one in force
    if run.model.get("block_causal"):
        better = "exact" if cache != "exact" else None
    else:
        better = "dual" if cache in ("none", "prefix") else None
    if better is None:
        return None
    left = _left_with(better, run, found)
    share = forward_share(run, "forward", "prefill")
    expected = 1 / (1 - share + share * min(1.0, left / found.computed_share)) if found.computed_share else 1.0
    if expected < thresholds.WORTH_A_CHANGE:
        return None
    why = (
        f"{found.computed_share:.0%} of all positions were computed anew in each of {found.forwards:,.0f} forwards "
        f"(cache {cache}), of {found.positions / found.forwards:,.0f} on average; with the cache {better} it would be "
        f"{left:.0%}."
    )
    low = expected * (1 - thresholds.REPLAY_DOUBT) if run.on_cpu else 1.0  # elsewhere a small step mostly reads weights
    gain = Gain(max(1.0, low), expected * (1 + thresholds.REPLAY_DOUBT), expected)
    advice = "Keep finished blocks: in a block-causal model that changes no answer."
    if better == "dual":
        advice = (
            "Keep all keys and values but the block's until the next block: what is kept was computed over masks, so "
        )
        advice += f"answers may change. {CAUTION}"
    return Verdict("recomputation", "forward", why, advice, run.change("--", better, "cache"), gain)


def few_tokens(case: RunCase) -> Verdict | None:
    """Forwards commit hardly more than one token each, by the schedule or since the threshold is high."""
    run, found = case.run, _model_bound(case.run)
    if found is None or found.tokens_per_forward >= thresholds.FEW_TOKENS:
        return None
    decoder = str(_in_force(run, "decoder") or "")
    steps, threshold, usual = _in_force(run, "steps"), _in_force(run, "threshold"), CONFIDENT.get(decoder)
    if decoder in SCHEDULED:
        in_force = f"and the schedule has {f'{steps:,} steps' if steps else 'a step for each token'}"
        advice = "Commit every token that the model is sure of, in as few steps as that takes"
        advice += "; or give fewer --steps." if "steps" in run.options.get("--", {}) else "."
        change = run.change("--", "threshold", "decoder")
    elif usual is not None and threshold is not None and threshold > usual:
        in_force, advice = f"and the threshold is {threshold:g}", f"Commit tokens from a confidence of {usual:g} on."
        change = run.change("--", usual, "threshold")
    else:
        return None  # the model is not sure of more: another threshold would be a worse answer
    idle = f", and {found.idle_share:.0%} of them committed none" if found.idle else ""
    why = (
        f"{found.tokens_per_forward:.2f} useful tokens came of each of {found.forwards:,.0f} forwards{idle}: the "
        f"decoder is {decoder}, {in_force}."
    )
    share = forward_share(run, "forward", "prefill")
    gain = Gain.up_to(1 / (1 - share + share / thresholds.MOST_GAIN))
    return Verdict("few tokens a forward", "forward", why, f"{advice} {CAUTION}", change, gain)


def _model_bound(run: Evidence) -> DiffusionCounters | None:
    """The steps' counters of a diffusion model that computes nearly all of the time; None of others."""
    found, busy = DiffusionCounters.of(run.steps), forward_share(run, "forward", "prefill")
    return found if found and found.forwards and busy >= thresholds.DIFFUSION_BUSY else None


def _left_with(cache: str, run: Evidence, found: DiffusionCounters) -> float:
    """The share of positions that would be computed: each block's, and whole canvases as often as it takes.

    A block of B positions takes B / (tokens committed a forward) forwards, of which one has the whole canvas; of
    block-causal models none has, and one more is needed to store the block.
    """
    canvas = found.positions / found.forwards
    answer = run.steps.get("output_tokens", 0) / max(run.requests, 1)
    block = min(float(_in_force(run, "block_length") or run.model.get("block") or answer or canvas), canvas)
    forwards = max(1.0, block * found.forwards / max(found.committed, 1.0))
    if cache == "exact":
        return min(1.0, (forwards + 1) * block / (forwards * canvas))
    return min(1.0, ((forwards - 1) * block + canvas) / (forwards * canvas))


def _in_force(run: Evidence, name: str) -> Any:
    """An option of decoding as given, else as the model has it."""
    given: Mapping[str, Any] = run.options.get("--", {})
    return run.model.get(name) if given.get(name) is None else given[name]
