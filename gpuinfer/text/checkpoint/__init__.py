"""From a model's name to its weights: Hugging Face folders, checkpoints of trainers, and built-in models."""

import gpuinfer.text.torch_import  # noqa: F401  before torch
from gpuinfer.text.checkpoint.built_in import BUILT_IN, save_folder
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles, settings_files
from gpuinfer.text.checkpoint.config_keys import masked_family_in
from gpuinfer.text.checkpoint.loader import open_checkpoint
from gpuinfer.text.checkpoint.memory_estimate import Estimate, adapter_bytes, refuse_oversized
from gpuinfer.text.checkpoint.peft_adapter import read_adapter

__all__ = [
    "BUILT_IN",
    "Checkpoint",
    "Estimate",
    "LanguageFiles",
    "adapter_bytes",
    "masked_family_in",
    "open_checkpoint",
    "read_adapter",
    "refuse_oversized",
    "save_folder",
    "settings_files",
]
