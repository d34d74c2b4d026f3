"""Experiments about runs: comparisons, simulations, estimates, checks and loops, each behind a command of its own."""
