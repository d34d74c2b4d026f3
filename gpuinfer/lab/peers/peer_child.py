"""The child's side: load a model once, then run prompts as often as asked. With this package, transformers or vLLM.

Another Python than ours may run this file, so that it imports nothing but the standard library before it is told to.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer.generation import Generation, Prompt
    from gpuinfer.text.generator import Prepared

Order = dict[str, Any]
Run = Callable[[Order], int]
"""Answers the prompts of an order, and returns how many tokens it made."""

Load = Callable[[Order], tuple[str, Run]]
"""Makes everything ready. Returns the generator's version, and what runs prompts."""

LONGEST_S = 3600.0  # one order; the parent's own limit is shorter


def converse(load: Load, package: str) -> None:
    """Serve the parent until it says quit. `package` is what a user installs to have this generator."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes where errors go
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    run: Run | None = None
    while (order := orders.get())["do"] != "quit":
        try:
            if order["do"] == "load":
                version, run = load(order)
                answer: Order = {"is": "ready", "version": version}
            elif run is not None:
                started = time.perf_counter()
                tokens = run(order)
                answer = {"is": "done", "seconds": time.perf_counter() - started, "tokens": tokens}
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent is to know
            answer = {"is": "error", "message": _message(error, package)}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def _listen(orders: queue.Queue[Order]) -> None:
    """Read orders until the last one. When the parent is gone before, end this process and all that it has started."""
    for line in sys.stdin:
        order = json.loads(line)
        orders.put(order)
        if order["do"] == "quit":
            return
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _message(error: BaseException, package: str) -> str:
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == package:
        return f"{package} is not installed for {sys.executable}"
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


KV_CACHE = "kv"  # a part of our own that can be switched off, in addition to `PARTS` of `open_generator`


def gpuinfer(order: Order) -> tuple[str, Run]:
    """As the backend `inprocess` does: the generator's thread, and its texts. `options` are those of the backend,
    `sampling` how tokens are drawn (the likeliest), `without` what is left out.
    """
    from concurrent.futures import Future
    from itertools import islice

    import msgspec

    from gpuinfer import __version__
    from gpuinfer.api import ModelSpec, Setup
    from gpuinfer.generation import Prompt, Sampling, Unmasking
    from gpuinfer.text.generator import Driver, open_generator
    from gpuinfer.text.text_options import TorchModelOptions

    unmasking = msgspec.convert(order.get("unmasking"), Unmasking | None)
    slots = order["rows"] * (2 if unmasking is not None and unmasking.cfg_scale else 1)  # of what guides a row, too
    arguments = {**order["arguments"], "slots": slots, "context": order["length"]}
    spec = ModelSpec(order["model"], weights=order["weights"], arguments=arguments, kind="text")
    setup = Setup(model=spec, devices=(order["device"],), dtype=order["dtype"], seed=order["seed"])
    without = set(order.get("without", ()))
    tuning = TorchModelOptions(**order.get("options", {}))
    generator = open_generator(spec, setup, tuning, without=without - {KV_CACHE})
    driver = Driver(generator)

    drawing = {"temperature": 0, **order.get("sampling", {})}

    def run(order: Order) -> int:
        """Never more than `at_once` prompts are under way."""
        sampling = Sampling(max_tokens=order["new_tokens"], ignore_eos=True, unmasking=unmasking, **drawing)
        wanted = [
            Prompt(tokens=tuple(tokens), sampling=sampling, key=str(number))
            for number, tokens in enumerate(order["prompts"])
        ]
        tokens, waiting = 0, iter(wanted)
        while some := list(islice(waiting, order["at_once"])):
            tokens += sum(map(len, recomputed(answered, some) if KV_CACHE in without else answered(some)))
        return tokens

    def answered(prompts: list[Prompt]) -> list[tuple[int, ...]]:
        futures: list[Future[Generation]] = [submitted(one) for one in generator.prepare(prompts)]
        return [future.result(LONGEST_S).completions[0].tokens for future in futures]

    def submitted(prepared: Prepared | Exception) -> Future[Generation]:
        if isinstance(prepared, Exception):
            raise prepared
        future: Future[Generation] = Future()

        def done(outcome: Generation | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        driver.submit(prepared, done)
        return future

    return __version__, run


def recomputed(answer: Callable[[list[Prompt]], list[tuple[int, ...]]], prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """The tokens that `answer` gives, each by a pass over all before it: nothing is kept from one to the next."""
    import msgspec

    answers: list[tuple[int, ...]] = [() for _ in prompts]
    for drawn in range(prompts[0].sampling.max_tokens):
        sampling = msgspec.structs.replace(prompts[0].sampling, max_tokens=drawn + 1)
        begun = zip(prompts, answers, strict=True)
        answers = answer([msgspec.structs.replace(one, sampling=sampling, begun=(before,)) for one, before in begun])
    return answers


def transformers(order: Order) -> tuple[str, Run]:
    """One batch, padded on the left, each step the likeliest token."""
    import torch

    library: Any = import_module("transformers")  # any version of it
    device = ("cuda" if torch.cuda.is_available() else "cpu") if order["device"] == "auto" else order["device"]
    model = library.AutoModelForCausalLM.from_pretrained(order["model"], dtype=getattr(torch, order["dtype"]))
    model = model.to(device).eval()
    model.generation_config = library.GenerationConfig(pad_token_id=0)  # greedy, whatever the folder says
    has_tokenizer = (Path(order["model"]) / "tokenizer_config.json").is_file()  # prompts come as tokens anyway
    tokenizer = library.AutoTokenizer.from_pretrained(order["model"]) if has_tokenizer else None

    def run(order: Order) -> int:
        """The answers' tokens; their text too, as the others make it."""
        prompts, at_once = order["prompts"], order["at_once"]
        parts = [prompts[start : start + at_once] for start in range(0, len(prompts), at_once)]
        return sum(batch(part, order["new_tokens"]) for part in parts)

    def batch(prompts: list[list[int]], new: int) -> int:
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            whole = model.generate(
                input_ids=rows.to(device),
                attention_mask=seen.to(device),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,  # goes on past the end token
            )
        answers = whole[:, longest:].tolist()
        if tokenizer is not None:
            tokenizer.batch_decode(answers, skip_special_tokens=True)
        return sum(map(len, answers))

    return str(library.__version__), run


USUAL = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # all cores compute, as with the others
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def vllm(order: Order) -> tuple[str, Run]:
    """Offline, as its documentation shows it: `LLM.generate`."""
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    library: Any = import_module("vllm")
    if order["device"].startswith("cuda:"):
        os.environ["CUDA_VISIBLE_DEVICES"] = order["device"].partition(":")[2]
    model = library.LLM(
        order["model"],
        dtype=order["dtype"],
        seed=order["seed"],
        max_model_len=order["length"],
        max_num_seqs=order["rows"],
        skip_tokenizer_init=not (Path(order["model"]) / "tokenizer_config.json").is_file(),
        disable_log_stats=True,
    )

    def run(order: Order) -> int:
        sampling = library.SamplingParams(temperature=0, max_tokens=order["new_tokens"], ignore_eos=True)
        prompts, at_once = [{"prompt_token_ids": prompt} for prompt in order["prompts"]], order["at_once"]
        tokens = 0
        for start in range(0, len(prompts), at_once):
            answers = model.generate(prompts[start : start + at_once], sampling, use_tqdm=False)
            tokens += sum(len(answer.outputs[0].token_ids) for answer in answers)
        return tokens

    return str(library.__version__), run
