"""Other people's generators, and our own, each in a child process of its own: to be measured side by side.

```
child.py              the parent's side: starts a child, talks to it, ends it whatever happens
talking.py            the child's side
with_transformers.py  with_vllm.py  with_ours.py    what a child runs
programs.py           the names, and how each child is started
```

Parent and child speak lines of JSON over the child's standard input and output:

```
→ {"do": "load", "model": …, "dtype": …, …}                      ← {"is": "ready", "version": "5.19.0"}
→ {"do": "run", "prompts": [[1, 2], …], "new_tokens": 128, …}    ← {"is": "done", "seconds": 1.2, "tokens": 8192}
→ {"do": "quit"}                                                 or {"is": "error", "message": …}
```

A child runs under any Python from 3.9 on, which need not know this package: `talking.py` and the peers' scripts import
nothing of ours but one another, and nothing heavy before they are asked to load.
"""
