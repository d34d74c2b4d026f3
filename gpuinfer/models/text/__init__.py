"""Text generation: checkpoints, the decoder, sampling, language, and the generator that puts them to work.

```
generator/    continuous batching: who has which slot, what the next step computes, what is finished
sampling/     from logits to tokens
language/     tokenizer, chat template, text as it grows, stop strings, constraints
decoder/      the transformer itself: one forward step over tokens of many rows
checkpoint/   folders and files: shape, weights, estimates
shape.py  weights.py  step.py    what they share
```
"""
