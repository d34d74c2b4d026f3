"""Text generation: checkpoints, the decoder, sampling, language, and the generator that puts them to work.

```
model.py       a model of text beside an event loop: prompts in, answers out
generator/     continuous batching: who has which slot, what the next step computes
diffusion/     the same for models that fill masks in, in any order
decoder/       one forward step over tokens of many rows
sampling/      from logits to tokens
language/      tokenizer, chat template, stop strings, constraints
checkpoint/    from a model's name to its weights
passive.py     how torch is loaded
step.py        what a step is, and what a decoder promises about it
shape.py       the sizes of a transformer       weights.py   its weights       arithmetic.py   what it is computed in
```
"""
