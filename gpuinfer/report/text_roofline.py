"""A run of a model of text held against the least time that its steps take here (`text.cost`, `text.bare`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.api import TextRoofline

ALIKE = 2.0  # times as many rows in a step, or as few: products of others are so much slower or quicker


def against(
    steps: Mapping[str, float], best: TextRoofline, wall_s: float, output_tokens: float, rows: float
) -> dict[str, Any] | None:
    """`{tokens_per_s, at_rows, least_s, flops, bytes, gflops_per_s, gbytes_per_s, efficiency, …}`, as the report has
    it. `rows` are those of a step, on average.

    None where nothing was counted, and of what an earlier run has measured where its steps had fewer than half or more
    than twice as many rows, or where this run took less time than that allows.

    Steps of prompts and of answers are held against the machine apart, since products of more rows are quicker; each
    kind takes as long as its operations or its bytes, whichever is longer.
    """
    flops, read = steps.get("flops", 0.0), steps.get("bytes", 0.0)
    if flops <= 0 or wall_s <= 0:
        return None
    if best.remembered and not best.at_rows / ALIKE <= rows <= best.at_rows * ALIKE:
        return None
    of_prompts, read_by_prompts = steps.get("prefill_flops", 0.0), steps.get("prefill_bytes", 0.0)
    products = of_prompts / best.prompt_flops_per_s, (flops - of_prompts) / best.flops_per_s
    memory = read_by_prompts / best.bytes_per_s, (read - read_by_prompts) / best.bytes_per_s
    least = sum(max(pair) for pair in zip(products, memory, strict=True))
    by_memory = sum(read_s for read_s, product_s in zip(memory, products, strict=True) if read_s > product_s)
    raised = least > wall_s
    if raised and best.remembered:
        return None  # it is of another machine, or of another moment of this one
    least = min(least, wall_s)
    return {
        "tokens_per_s": output_tokens / least,
        "at_rows": best.at_rows,
        "least_s": least,
        "flops": flops,
        "bytes": read,
        "gflops_per_s": best.flops_per_s / 1e9,
        "own_gflops_per_s": best.own_flops_per_s / 1e9,
        "prompt_gflops_per_s": best.prompt_flops_per_s / 1e9,
        "gbytes_per_s": best.bytes_per_s / 1e9,
        "efficiency": least / wall_s,
        "limited_by": "memory" if 2 * by_memory > least else "products",
        "remembered": best.remembered,
        "raised": raised,
    }
