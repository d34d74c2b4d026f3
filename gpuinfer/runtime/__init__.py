"""A workload's way to answers: its session, and the worker processes that it starts."""
