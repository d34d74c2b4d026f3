"""vLLM as the engine: `AsyncLLM` in a process of its own, or a server of its that runs already.

```
installed.py      whether it is there, and its version one that we know
arguments.py      a backend's options → vLLM's engine arguments
folder.py         the model as a folder that vLLM reads
sampling.py       Sampling → SamplingParams, exactly or refused
answers.py        what vLLM drew → Completion, Part, Logprob
listed.py         lists between tags as they travel to the logits processors
asking.py         prompts made ready
driver.py         prompts under way in AsyncLLM; what takes the place of our own driver under `text.model.TextModel`
engine.py         AsyncLLM: started, asked, closed
counting.py       its counters and forward steps
adapters.py       LoRA adapters by name and version
texts.py          the backend in the engine's process
extension.py      what vLLM's own worker processes load of ours
```

No file here imports vLLM as long as nothing is started.
"""
