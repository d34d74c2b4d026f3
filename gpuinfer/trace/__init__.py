"""Traces: what happened in the queues of a run, written as it happens, joined into one file, read again."""
