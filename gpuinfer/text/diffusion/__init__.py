"""Masked diffusion models: answers that are filled in a block at a time, some tokens a step, in any order."""
