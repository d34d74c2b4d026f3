"""Masked diffusion models: answers that are filled in a block at a time, some tokens a step, in any order.

diffusion_generator.py is a step from start to end: compose, forward, score, decide, apply.
"""
