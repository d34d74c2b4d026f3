"""Rollouts in several ways: what batching, the buffer, the reference and the constraint are worth, case by case."""
