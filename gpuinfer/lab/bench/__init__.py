"""Runs of the same work in different ways, compared: which way wins here, how sure that is, and why."""
