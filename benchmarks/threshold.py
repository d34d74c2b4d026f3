"""What a threshold on the queue is worth: the mean latency of the best one against serving whatever waits.

    python benchmarks/threshold.py

One server, Poisson arrivals, batches of at most 200 rows that take α·n + β: the Markov chain of batch sizes, solved for
every threshold ("serve as soon as Q rows wait", the best rule there is: Deb and Serfozo, "Optimal control of batch
service queues", 1973).
"""

from __future__ import annotations

import numpy as np
from scipy.stats import poisson

MOST = 200
FULL = 64  # rows of the batches that a load is a share of
LINES = ((1e-3, 10e-3), (0.2e-3, 2e-3), (0.05e-3, 2e-3), (0.01e-3, 10e-3))  # α, β in seconds
LOADS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def mean_latency(threshold: int, rate: float, alpha: float, beta: float) -> float:
    """Seconds from arrival to answer, by Little's law from the mean number of rows in the system."""
    arrivals, sizes = np.arange(MOST + 1), np.arange(1, MOST + 1)
    missing = np.maximum(threshold - arrivals, 0)  # rows that have to come before the next batch may start
    waiting = np.array([sum(range(count, threshold)) for count in arrivals]) / rate  # row-seconds until they have
    steps, seconds, row_seconds = np.zeros((MOST, MOST)), np.zeros(MOST), np.zeros(MOST)
    for index, size in enumerate(sizes):
        service = alpha * size + beta
        chance = poisson.pmf(arrivals, rate * service)
        chance[-1] += max(0.0, 1 - chance.sum())
        np.add.at(steps[index], np.clip(np.maximum(arrivals, threshold), 1, MOST) - 1, chance)
        seconds[index] = service + (chance * missing).sum() / rate
        row_seconds[index] = size * service + (chance * arrivals).sum() * service / 2 + (chance * waiting).sum()
    balance = np.vstack([steps.T - np.eye(MOST), np.ones(MOST)])
    share = np.linalg.lstsq(balance, np.append(np.zeros(MOST), 1.0), rcond=None)[0]
    return float((share @ row_seconds) / (share @ seconds) / rate)


def main() -> None:
    print("    α ms    β ms  load    λβ/2  best threshold  gain")
    for alpha, beta in LINES:
        for load in LOADS:
            rate = load * FULL / (alpha * FULL + beta)
            times = [mean_latency(threshold, rate, alpha, beta) for threshold in range(1, 33)]
            best = int(np.argmin(times))
            gain = times[0] / times[best] - 1
            print(f"{1e3 * alpha:8g}{1e3 * beta:8g}{load:6.0%}{rate * beta / 2:8.1f}{best + 1:16d}{gain:7.1%}")


if __name__ == "__main__":
    main()
