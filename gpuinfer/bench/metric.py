"""What runs are compared by: a rate, of which more is better, or a latency, of which less is.

A load that comes from outside is answered at the same rate by whoever keeps up with it: what tells two ways of serving
it apart is how long the answers take. So such runs are compared by the 95th percentile of the latency, among those that
keep up.
"""

from __future__ import annotations

LATENCY = "latency_p95_s"
LATENCIES = {LATENCY: "p95 latency"}
KEEPS_UP = 0.99  # of the rows that the best answers: less is a load that grows behind


def is_latency(metric: str) -> bool:
    """Whether less of it is better, and it is in seconds."""
    return metric in LATENCIES


def goodness(metric: str, value: float) -> float:
    """Such that more is better, and ratios are those of the values; 0 for a value that says nothing."""
    if not is_latency(metric):
        return value
    return 1 / value if value > 0 else 0.0
