"""Rollouts for training: environments, the record of what was played, and what trainers read of it."""
