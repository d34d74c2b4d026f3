"""Rollouts: the workload that plays environments with a model, for training."""
