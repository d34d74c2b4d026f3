"""Continuous batching: slots and pages of rows, composition of steps, finished answers.

generator.py writes from left to right, text/diffusion fills masks in; driver.py is the thread that steps either.
"""

import gpuinfer.text.torch_import  # noqa: F401  before torch
from gpuinfer.text.generator.driver import Driver
from gpuinfer.text.generator.generator import Generator
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.generator.setup import open_generator
from gpuinfer.text.generator.slotted import SlottedGenerator, Stepped

__all__ = ["Driver", "Generator", "Prepared", "SlottedGenerator", "Stepped", "open_generator"]
