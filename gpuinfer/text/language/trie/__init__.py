"""A list between tags as a tree of tokens, and rows on their way through it.

```
lines.py     what the list's lines are, as tokens      tokens.py   what each token of a vocabulary says, as bytes
tag.py       the tag before it, in text                trie.py     all of it compiled; kept by content
walks.py     many rows on their way                    matcher.py  one of them      replay.py   where a row was
cpu_*.py     the compiled code: cpu_image.py (the form of a tree), cpu_grow.py, cpu_tag.py, cpu_walk.py
```
"""
