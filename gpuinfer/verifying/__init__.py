"""Whether a model gives the same answers whichever way it is asked, on the user's own checkpoint.

```
verification.py   all checks in their order, the document and what is said of it
rig.py            the options, which prompts are asked, and the model opened for it
witness.py        a decoder that is watched       asking.py     the ways to ask, and prompts asked in one
masks.py         the ways to ask a diffusion model, and what they come to
judging.py        two ways' answers compared: a tie, or a fault
positions.py      logits at every position, against another decoder
rounding.py       the same in narrow number formats, judged by the distance to float32
tokenizing.py     the tokens of texts and chats
peer.py  peer_child.py    transformers, in a process of its own
```
"""
