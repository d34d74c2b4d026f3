"""vLLM as the engine: `AsyncLLM` in a process of its own, or a vLLM server that runs already.

No file here but the logits processors imports vLLM as long as nothing is started.
"""
