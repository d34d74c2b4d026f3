"""What other programs call the things that we have: words of vLLM, Ray, llama.cpp, OpenSpiel and of the field.

A word that is not known is answered with ours, and only else with one that is spelled nearly so.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gpuinfer.errors import nearest

ALIKE = 0.7  # how near a flag must be spelled: less suggests flags that have nothing to do with it
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

QUANTISED = "Quantised weights are not read. Give the original ones; --dtype bfloat16 halves what they take."
NOTHING_FETCHED = (
    "Nothing is downloaded. Fetch the folder (hf download OWNER/NAME --local-dir NAME), and give it as --model."
)
ALWAYS = "That is always so here. Leave it out."
CURVES = (
    "Curves are files here: `gpuinfer train --out DIR` writes loss.jsonl and a picture, --json FILE a run's report."
)
DECIDES = "The model's folder decides that. Leave it out."
NO_BEAMS = "There is no beam search. --num-samples N gives several answers."
NO_DRAFTS = "There is no speculative decoding but vLLM's: --backend vllm -B speculative_config=JSON."
DEVICES = ("--gpus", "--device cuda")

FLAGS: dict[str, tuple[str, ...]] = {
    # vLLM
    "max-model-len": ("--context",),
    "max-num-seqs": ("--batch-size", "-B slots=N"),
    "max-num-batched-tokens": ("-B step_tokens=N",),
    "gpu-memory-utilization": ("-B pages=N",),
    "tensor-parallel-size": ("-B parallel=layers",),
    "tp": ("-B parallel=layers",),
    "pipeline-parallel-size": ("-B parallel=pipeline",),
    "pp": ("-B parallel=pipeline",),
    "data-parallel-size": ("--replicas", "--device cuda"),
    "dp": ("--replicas", "--device cuda"),
    "quantization": (QUANTISED,),
    "load-format": (QUANTISED,),
    "kv-cache-dtype": ("Keys and values are kept in the --dtype of the run. Leave it out.",),
    "block-size": ("A page is 32 positions. Leave it out.",),
    "enforce-eager": ("-B graphs=false",),
    "enable-prefix-caching": (ALWAYS,),
    "enable-chunked-prefill": (ALWAYS,),
    "api-key": ("--api-key-file",),
    "ssl-keyfile": ("--tls-key",),
    "ssl-certfile": ("--tls-cert",),
    "lora-modules": ("--adapter NAME=DIR",),
    "enable-lora": ("--adapter NAME=DIR",),
    "max-loras": ("-B max_adapters=N",),
    "tokenizer": (DECIDES,),
    "chat-template": (DECIDES,),
    "download-dir": (NOTHING_FETCHED,),
    "revision": (NOTHING_FETCHED,),
    "speculative-config": (NO_DRAFTS,),
    "speculative-model": (NO_DRAFTS,),
    "disable-log-requests": ("--quiet",),
    "max-tokens": ("--max-new-tokens",),
    "best-of": ("--num-samples",),
    "use-beam-search": (NO_BEAMS,),
    "num-beams": (NO_BEAMS,),
    "guided-json": ("--json-schema",),
    "guided-regex": ("--regex",),
    "guided-choice": ("--choice",),
    "guided-grammar": ("--grammar",),
    # Ray
    "num-gpus": DEVICES,
    "num-replicas": ("--replicas",),
    "num-workers": ("--workers",),
    "num-cpus": ("--workers", "-B threads=N"),
    "num-env-runners": ("--workers",),
    "address": ("--launcher ray -L address=…", "--host"),
    "max-ongoing-requests": ("--max-queue-rows",),
    "max-queued-requests": ("--max-queue-rows",),
    "autoscaling-config": ("--max-replicas",),
    "dashboard-port": ("--port",),
    # llama.cpp
    "c": ("--context",),
    "ctx-size": ("--context",),
    "n-ctx": ("--context",),
    "n": ("--max-new-tokens", "--num-samples"),
    "predict": ("--max-new-tokens",),
    "n-predict": ("--max-new-tokens",),
    "ngl": DEVICES[::-1],
    "gpu-layers": DEVICES[::-1],
    "n-gpu-layers": DEVICES[::-1],
    "t": ("-B threads=N", "--workers"),
    "threads": ("-B threads=N", "--workers"),
    "b": ("--batch-size",),
    "ub": ("-B step_tokens=N",),
    "ubatch-size": ("-B step_tokens=N",),
    "np": ("--batch-size", "-B slots=N"),
    "parallel": ("-B slots=N",),
    "temp": ("--temperature",),
    "repeat-penalty": ("--repetition-penalty",),
    "f": ("--input",),
    "file": ("--input",),
    "m": ("--model",),
    "p": ("--prompt",),
    "s": ("--seed",),
    "sys": ("--system",),
    "system-prompt": ("--system",),
    "grammar-file": ("--grammar",),
    "lora": ("--adapter NAME=DIR",),
    "cont-batching": (ALWAYS,),
    "flash-attn": ("How attention is computed is not chosen here. Leave it out.",),
    "metrics": ("/metrics is always served. Leave it out.",),
    "jinja": (ALWAYS,),
    "hf": (NOTHING_FETCHED,),
    "hf-repo": (NOTHING_FETCHED,),
    "cnv": ("`gpuinfer chat` is a conversation.",),
    "interactive": ("`gpuinfer chat` is a conversation.",),
    "embedding": ("Embeddings are not served.",),
    "draft-model": (NO_DRAFTS,),
    # OpenSpiel, and other AlphaZeros
    "num-games": ("--games",),
    "episodes": ("--games",),
    "max-simulations": ("--simulations",),
    "num-simulations": ("--simulations",),
    "visits": ("--simulations",),
    "playouts": ("--simulations",),
    "uct-c": ("--exploration",),
    "cpuct": ("--exploration",),
    "c-puct": ("--exploration",),
    "policy-epsilon": ("--noise",),
    "policy-alpha": ("--concentration",),
    "dirichlet-alpha": ("--concentration",),
    "temperature-drop": ("--temperature-moves",),
    "actors": ("--workers",),
    "evaluators": ("--games-in-flight",),
    "replay-buffer-size": ("--window",),
    "train-batch-size": ("--batch-size",),
    "nn-model": ("--model",),
    "player1": ("--model",),
    "player2": ("--opponent-model",),
    "opponent": ("--opponent-model",),
    "rollout-count": ("--model rollout",),
    # the field's
    "lr": ("--learning-rate",),
    "epochs": ("--steps",),
    "max-steps": ("--steps", "--iterations"),
    "num-iterations": ("--iterations",),
    "max-length": ("--max-new-tokens", "--context"),
    "max-seq-len": ("--context",),
    "context-length": ("--context",),
    "num-return-sequences": ("--num-samples",),
    "do-sample": ("--temperature",),
    "greedy": ("--temperature 0",),
    "bs": ("--batch-size",),
    "concurrency": ("--batch-size", "--clients"),
    "num-prompts": ("--requests",),
    "request-rate": ("--rate",),
    "fp16": ("--dtype float16",),
    "half": ("--dtype float16",),
    "bf16": ("--dtype bfloat16",),
    "precision": ("--dtype",),
    "load-in-8bit": (QUANTISED,),
    "load-in-4bit": (QUANTISED,),
    "quantize": (QUANTISED,),
    "gpu": ("--device cuda",),
    "cuda": ("--device cuda",),
    "cpu": ("--device cpu",),
    "num-processes": ("--workers",),
    "jobs": ("--workers",),
    "j": ("--workers",),
    "o": ("--output", "--out"),
    "output-dir": ("--out", "--output"),
    "output-file": ("--output", "--out"),
    "save-dir": ("--out", "--output"),
    "log-dir": ("--log-dir", "--out", CURVES),
    "i": ("--input",),
    "input-file": ("--input",),
    "dataset": ("--input", "--prompts", "--records"),
    "data": ("--records", "--input"),
    "ckpt": ("--weights", "--checkpoint"),
    "load": ("--weights",),
    "resume-from-checkpoint": ("--resume",),
    "tensorboard": (CURVES,),
    "wandb": (CURVES,),
    "mlflow": (CURVES,),
    "debug": ("-v",),
    "log-level": ("-v",),
    "silent": ("--quiet",),
    "bind": ("--host",),
    "listen": ("--host",),
}
"""Their flag, without dashes → ours that does the same, the first of which a command has; or a sentence."""

COMMANDS = {
    **dict.fromkeys(("infer", "predict", "complete", "completion", "run-batch", "batch", "llama-cli"), "generate"),
    **dict.fromkeys(("server", "api-server", "up", "deploy", "api", "llama-server", "start"), "serve"),
    **dict.fromkeys(("eval", "evaluate", "match", "arena", "tournament"), "selfplay --opponent-model"),
    **dict.fromkeys(("alphazero", "az", "rl"), "loop"),
    **dict.fromkeys(("ls", "list", "models"), "plugins list"),
    **dict.fromkeys(("info", "env", "collect-env", "check"), "doctor"),
    **dict.fromkeys(("help", "man"), "docs"),
    **dict.fromkeys(("new", "init", "scaffold"), "plugins new"),
    **dict.fromkeys(("onnx", "to-onnx", "convert"), "export"),
    **dict.fromkeys(("sweep", "compare"), "bench --compare"),
    "status": "fleet status",
    "install": "plugins install",
    "uninstall": "plugins uninstall",
    "version": "--version",
    "pull": NOTHING_FETCHED,
    "download": NOTHING_FETCHED,
    "quantize": QUANTISED,
}


def flag_hint(word: str, known: Collection[str]) -> str:
    """The hint for a flag that is not among a command's flags, `known`: a sentence, or "" where there is none."""
    plain = _plain(word)
    flags = {_plain(one): one for one in known}
    if plain in flags:
        return _meant(flags[plain])
    for ours in FLAGS.get(plain, ()):
        if not ours.startswith("-"):
            return ours
        if ours.split()[0] in known:
            return _meant(ours)
    if plain in FLAGS:
        return f"Other commands have it as '{FLAGS[plain][0]}'."
    near = nearest(plain, [one for one in flags if len(one) > 1], ALIKE)
    return _meant(flags[near]) if near else ""


def option_hint(word: str, known: Collection[str]) -> str:
    """The same for an option by its name in a file or behind -B, where names have underscores and no dashes."""
    names = {_plain(one): one for one in known}
    plain = _plain(word)
    if plain in names:
        return _meant(names[plain])
    for ours in FLAGS.get(plain, ()):
        if not ours.startswith("-"):
            return ours
        first, _, rest = ours.partition(" ")
        if (name := _plain(rest.partition("=")[0] if first == "-B" else first)) in names:
            return _meant(names[name])
    holding = [name for name in names if plain in name.split("-")]  # `wait` is in `max_wait`
    near = holding[0] if len(holding) == 1 else nearest(plain, names, ALIKE)
    return _meant(names[near]) if near else ""


def command_hint(word: str) -> str:
    """The hint for a command of another program; "" where there is none."""
    found = COMMANDS.get(word.replace("_", "-"), "")
    return found if not found or found.endswith(".") else f"Did you mean 'gpuinfer {found}'?"


def hub_hint(name: str) -> str:
    """How a model is brought whose name is one of a hub; "" for any other name."""
    if not HUB_NAME.fullmatch(name):
        return ""
    folder = name.partition("/")[2]
    return f"To bring it from Hugging Face: hf download {name} --local-dir {folder}, then --model {folder}."


def _meant(ours: str) -> str:
    return f"Did you mean '{ours}'?"


def _plain(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()
