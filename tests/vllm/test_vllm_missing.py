"""A plugin whose library is not installed is shown with the cure, and is no fault of this machine's."""

from __future__ import annotations

from gpuinfer.backends import vllm
from gpuinfer.config import registry
from gpuinfer.config.registry import PluginRecord


def test_a_plugin_whose_library_is_missing_can_be_loaded_and_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(vllm.util, "find_spec", lambda name: None)
    record = PluginRecord("backends", "vllm", "gpuinfer", "0", "gpuinfer.backends.vllm:Vllm")
    found = registry.inspect(record)
    assert found.ok
    assert found.reason.startswith(f"{registry.LACKS}vLLM is not installed. Install it: pip install 'gpuinfer[vllm]'")
