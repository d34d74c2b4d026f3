"""Prompt look-up on text that repeats, a row at a time: a Markdown table of tokens a step, and of processor time a
token without it over processor time with it, of the whole process, so that a busy machine does not show.

    python benchmarks/speculation.py FOLDER [--draft FOLDER] [--dtype float32|bfloat16] [--tokens 128] [--repeats 2]

Each prompt is answered without and with proposals in turn, once by the likeliest tokens and once by drawn ones; answers
that differ end the run. The folder is that of a chat model, such as SmolLM2.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import mean
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Completion, Generation, Prompt, Sampling
from gpuinfer.text.generator import Generator, open_generator
from gpuinfer.text.text_options import TorchModelOptions

CODE = '''def read_settings(path):
    """Read settings from a file of name=value lines."""
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, sign, value = line.partition("=")
            if not sign:
                raise ValueError(f"{line} is not name=value")
            settings[name.strip()] = value.strip()
    return settings
'''
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
"""
FOREST = (
    "The great forest covers 5.5 million square kilometres in nine countries, of which one has the largest part, "
    "about 60 percent. It is home to 390 billion trees of 16,000 species. Rain falls on more than 200 days of the"
    " year. In the last fifty years about 17 percent of the forest has been cut down, mostly for cattle and "
    "soybeans. Scientists warn that it may turn into a savanna if more than 20 to 25 percent is lost, because the"
    " trees bring about much of the rain."
)
COUNCIL = (
    "On Monday the city council voted to build a new bridge over the Green River. The bridge will cost 45 million"
    " dollars and will be open to traffic in the autumn of 2027. The mayor said that the old bridge, which was "
    "built in 1931, could no longer carry the weight of modern trucks. The council promised to plant four hundred"
    " trees along the road."
)
REPEATING = {
    "code with type hints": f"Add type hints to this Python code and give the whole code.\n\n{CODE}",
    "code with a new method": f"Add a method `clear` to this class. Give the whole class.\n\n{STACK}",
    "summary of a text": f"Summarize the following text.\n\n{FOREST}",
    "summary of an article": f"Summarize the following article in a few sentences.\n\n{COUNCIL}",
    "corrected text": "Correct the spelling of this text and write it down again.\n\n" + COUNCIL.replace("dge", "ge"),
}
FREE = {"a story": "Tell me a story about a dragon who learns to cook."}
WAYS = {"likeliest": {"temperature": 0.0}, "drawn": {"temperature": 0.7, "top_p": 0.95}}


def answered(generator: Generator, prompt: Prompt) -> tuple[Completion, int, float]:
    """The answer, the steps after its first token, and the processor seconds that they took."""
    [prepared] = generator.prepare([prompt])
    if isinstance(prepared, Exception):
        raise prepared
    generator.add("it", prepared)
    generator.step()
    steps, began, found = 0, time.process_time(), list[Any]()
    while generator.busy:
        found += generator.step().finished
        steps += 1
    [(_, outcome)] = found
    assert isinstance(outcome, Generation)
    return outcome.completions[0], steps, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--draft", help="a smaller model that proposes, instead of the look-up")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    own = parser.parse_args()
    spec, setup = ModelSpec(name=own.folder, kind="text"), Setup(devices=("cpu",), dtype=own.dtype)
    proposing: dict[str, Any] = {"draft": own.draft} if own.draft else {"speculate": "lookup"}
    plain = open_generator(spec, setup, TorchModelOptions(slots=1, context=2048))
    quick = open_generator(spec, setup, TorchModelOptions(slots=1, context=2048, **proposing))
    assert isinstance(plain, Generator)
    assert isinstance(quick, Generator)
    print("| text | tokens | tokens a step | processor time a token, without ÷ with |\n|---|---|---|---|", flush=True)
    rates = defaultdict[bool, list[tuple[float, float]]](list)
    for name, text in (REPEATING | FREE).items():
        for way, settings in WAYS.items():
            sampling = Sampling(max_tokens=own.tokens, seed=1, **settings)
            prompt = Prompt(messages=({"role": "user", "content": text},), key=name, sampling=sampling)
            found = [(answered(plain, prompt), answered(quick, prompt)) for _ in range(own.repeats)]
            if any(one[0] != other[0] for one, other in found):
                raise SystemExit(f"{name}, {way}: the answers differ.")
            further = len(found[0][0][0].tokens) - 1
            each = mean(further / max(1, other[1]) for _, other in found)
            gain = sum(one[2] for one, _ in found) / sum(other[2] for _, other in found)
            rates[name in REPEATING].append((each, gain))
            print(f"| {name}, {way} | {further + 1} | {each:.2f} | {gain:.2f} |", flush=True)
    for repeats, values in sorted(rates.items(), reverse=True):
        each, gain = map(mean, zip(*values, strict=True))
        print(f"| **{'all that repeat' if repeats else 'free text'}** | | **{each:.2f}** | **{gain:.2f}** |")
    plain.close()
    quick.close()


if __name__ == "__main__":
    main()
