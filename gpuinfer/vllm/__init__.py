"""vLLM as an engine: what is sent to it, and what of ours runs inside it."""
