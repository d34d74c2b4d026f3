"""The backends that come with gpuinfer: the model in this process, a central server, a fleet, vLLM, and a stand-in."""
