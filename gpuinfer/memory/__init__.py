"""What a model takes, known before it is spent: an estimate, and a child process that tries it on some small batches.

```
asked.py      the options, and which model of what sizes they mean
measuring.py  the child, which tells what is known as it becomes known
examining.py  one memory: what is estimated, which batches are tried, what they took; never more than a bound
rows.py       a network of rows at a number of rows        text.py    a model of text at a number of slots
staged_rows.py, staged_text.py   the same of a model in stages; stages.py   those of them that lie in one memory
parts.py      what all are asked          fitting.py   the largest batch under a bound
probing.py    the parent: starts the child, and says what became of it
document.py   gpuinfer.memory/1, and what people see of it
```
"""
