"""What other programs call the things that we have: words of vLLM, Ray, llama.cpp, OpenSpiel, nanoGPT and of the field.

A word that is not known is answered with ours, and only else with one that is spelled nearly so.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gpuinfer.errors import nearest

ALIKE = 0.7  # how near a flag must be spelled: less suggests flags that have nothing to do with it
HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w.-]+\.gguf))?"
    r"(?:@(?P<revision>[\w.+-]+(?:/[\w.+-]+)*))?"
)
"""OWNER/NAME of the Hugging Face hub, where wanted with a file of it, and with a branch, a tag or a commit."""

QUANTISED = (
    "How weights are quantised is read from their files. Leave it out; -B weights=int8 rounds others on loading."
)
FETCHED = "Name the model of the hub, --model OWNER/NAME or OWNER/NAME@REVISION; --download fetches it."
CACHED = "Models of the hub lie in its cache: set HF_HOME, or HF_HUB_CACHE. --download fetches them."
ALWAYS = "That is always so here. Leave it out."
CURVES = "Runs have them: --track tensorboard=DIR of train, loop, rollouts, selfplay and generate."
EXPORTED = (
    "`gpuinfer selfplay export DIR` writes positions as Parquet, `gpuinfer rollouts export DIR` what trainers read."
)
DECIDES = "The model's folder decides that. Leave it out."
NO_BEAMS = "There is no beam search. --num-samples N gives several answers."
SERVED = "It is always served where the model can do it. Leave it out."
IN_A_BATCH = "At most so many are in a batch: -B max_rows=N of networks of rows, -B slots=N of text."
NO_GRPC = "There is no gRPC: Triton's clients for HTTP are served, with tensors as bytes. Leave it out."
NO_VIRTUAL_LOSS = "Each tree is searched sequentially, many games at a time (--games-in-flight). Leave it out."

OURS: dict[tuple[str, ...], str] = {
    ("--context",): "max-model-len c ctx-size n-ctx max-seq-len context-length",
    ("--batch-size", "-B slots=N"): "max-num-seqs np",
    ("--batch-size", IN_A_BATCH, "-B max_rows=N"): (
        "batch-size max-batch-size preferred-batch-size inference-batch-size gpu-batch-size"
    ),
    ("-S max_wait=10ms",): (
        "batch-timeout batch-timeout-ms batch-wait-timeout-s timeout-ms max-wait max-wait-ms max-latency-ms"
        " max-queue-delay-microseconds"
    ),
    ("--backend central",): "use-gpu-server gpu-server inference-server use-inference-server use-server central",
    ("--replicas", "--backend fleet -B replicas=N"): "num-engines engines vllm-num-engines",
    ("-B step_tokens=N",): "max-num-batched-tokens ub ubatch-size",
    ("-B pages=N",): "gpu-memory-utilization",
    ("-B parallel=layers",): "tensor-parallel-size tp",
    ("-B parallel=pipeline",): "pipeline-parallel-size pp",
    ("--replicas", "--device cuda"): "data-parallel-size dp",
    (QUANTISED,): "quantization load-format load-in-8bit load-in-4bit quantize",
    ("Keys and values are kept in the --dtype of the run. Leave it out.",): "kv-cache-dtype",
    ("A page is 32 positions. Leave it out.",): "block-size",
    ("-B graphs=false",): "enforce-eager",
    ("-B graphs=true",): "cuda-graphs use-cuda-graphs",
    ("--request-timeout",): "timeout",
    ("--max-queue-rows",): "queue-size max-queue-size",
    ("--constrain",): "logits-processor logits-processors",
    (NO_GRPC,): "grpc-port",
    (ALWAYS,): (
        "enable-prefix-caching enable-chunked-prefill cont-batching jinja dynamic-batching use-kv-cache use-cache"
        " no-cache"
    ),
    ("--api-key-file",): "api-key",
    ("--tls-key",): "ssl-keyfile",
    ("--tls-cert",): "ssl-certfile",
    ("--adapter NAME=DIR",): "lora-modules enable-lora lora lora-rank",
    ("-B max_adapters=N",): "max-loras",
    (DECIDES,): "tokenizer chat-template",
    (FETCHED,): "revision hf hf-repo",
    (CACHED,): "download-dir cache-dir",
    ("-B speculate=lookup",): "speculative-config speculative-decoding",
    ("-B draft=DIR",): "speculative-model draft-model model-draft md",
    ("--quiet",): "disable-log-requests silent",
    ("--max-new-tokens",): "max-tokens predict n-predict tokens gen-length generation-length sequence-length length",
    ("--num-samples", "--samples-per-group"): "best-of num-return-sequences num-samples num-sequences group-size",
    (NO_BEAMS,): "use-beam-search num-beams beam-size beam-width",
    ("--json-schema",): "guided-json",
    ("--regex",): "guided-regex",
    ("--choice",): "guided-choice",
    ("--grammar",): "guided-grammar grammar-file",
    ("--gpus", "--device cuda"): "num-gpus",
    ("--replicas",): "num-replicas nodes num-nodes",
    ("--workers", "--replicas"): "workers num-workers num-env-runners actors num-processes jobs j",
    ("--workers", "-B threads=N"): "num-cpus",
    ("--launcher ray -L address=…", "--host"): "address",
    ("--max-inputs",): "max-ongoing-requests max-concurrent-requests max-concurrency target-inputs",
    ("--queue-limit", "--max-queue-rows"): "max-queued-requests",
    ("--max-replicas",): "autoscaling-config",
    ("--port",): "dashboard-port http-port",
    ("--max-new-tokens", "--num-samples"): "n",
    ("--device cuda", "--gpus"): "ngl gpu-layers n-gpu-layers",
    ("-B threads=N", "--workers"): "t threads",
    ("--batch-size",): "b train-batch-size bs",
    ("-B slots=N",): "parallel",
    ("--temperature",): "temp do-sample",
    ("--repetition-penalty",): "repeat-penalty",
    ("--input",): "f file i input-file prompts-file prompt-file matches",
    ("--model",): "m nn-model player1 init-from network net model-path model-dir model-name-or-path model-repository",
    ("--prompt",): "p start",
    ("--checkpoint", "--out", "--weights"): "out-dir",
    ("--meta",): "meta-path meta-file vocab",
    ("-B compile=true",): "compile torch-compile",
    ("--seed",): "s",
    ("--system",): "sys system-prompt",
    ("How attention is computed is not chosen here. Leave it out.",): "flash-attn",
    ("/metrics is always served. Leave it out.",): "metrics",
    ("`gpuinfer chat` is a conversation.",): "cnv interactive",
    (SERVED,): "embedding embeddings reranking kserve",
    ("--games", "--groups"): "num-games episodes num-episodes num-rollouts games",
    (
        "--simulations",
    ): "max-simulations num-simulations mcts-simulations mcts-sims sims sims-per-move num-sims visits playouts",
    ("--exploration",): "uct-c cpuct c-puct",
    ("--noise",): "policy-epsilon",
    ("--concentration",): "policy-alpha dirichlet-alpha",
    ("--temperature-moves",): "temperature-drop",
    ("--games-in-flight", "--groups-in-flight"): "evaluators games-per-worker parallel-games concurrent-games num-envs",
    (NO_VIRTUAL_LOSS,): "virtual-loss parallel-leaves leaves-per-batch",
    ("--horizon",): "horizon-years rollout-horizon-years max-years",
    ("--buffer-depth",): "buffer-size queue-depth prefetch",
    ("--window",): "replay-buffer-size",
    ("--opponent-model",): "player2 opponent",
    ("--model rollout",): "rollout-count",
    ("--learning-rate",): "lr",
    ("--steps",): "epochs diffusion-steps",
    ("--decoder",): "remasking remasking-strategy algorithm alg",
    ("--worker-base-port",): "worker-port worker-ports base-port worker-start-port start-port",
    ("--health-interval",): "health-check-interval",
    ("--queue global",): "global-queue central-queue shared-queue",
    ("--routing",): "load-balancing load-balancer lb-policy lb-strategy balancing policy",
    ("--launcher slurm -L partition=NAME",): "slurm sbatch partition",
    ("--launcher slurm -L account=NAME",): "account",
    ("--launcher slurm -L gpus=N",): "gres",
    ("--steps", "--iterations"): "max-steps",
    ("--iterations",): "num-iterations",
    ("--max-new-tokens", "--context"): "max-length",
    ("--temperature 0",): "greedy",
    ("--batch-size", "--clients"): "concurrency",
    ("--requests",): "num-prompts",
    ("--rate",): "request-rate",
    ("--dtype float16",): "fp16 half",
    ("--dtype bfloat16",): "bf16",
    ("--dtype",): "precision",
    ("--device cuda",): "gpu cuda",
    ("--device cpu",): "cpu",
    ("--output", "--out"): "o output-file",
    ("--out", "--output"): "output-dir save-dir",
    ("--log-dir", "--track tensorboard=DIR", "--out"): "log-dir logging-dir",
    ("--input", "--prompts", "--records"): "dataset",
    ("--records", "--input"): "data",
    ("--weights", "--checkpoint"): "ckpt",
    ("--weights",): "load checkpoint",
    ("--resume",): "resume-from-checkpoint",
    ("--track tensorboard=DIR", CURVES): "tensorboard tensorboard-dir",
    ("--track wandb=PROJECT", CURVES): "wandb wandb-project",
    ("--track mlflow=EXPERIMENT", CURVES): "mlflow",
    ("--track", CURVES): "report-to logger log-to",
    (EXPORTED,): "to",
    ("-v",): "debug log-level",
    ("--host",): "bind listen",
}
"""Flags of ours, the first of which a command has, or a sentence → what it is called elsewhere, without dashes."""

FLAGS = {word: ours for ours, words in OURS.items() for word in words.split()}
"""Their flag, without dashes → ours that does the same, the first of which a command has; or a sentence."""

COMMANDS = {
    **dict.fromkeys(("infer", "predict", "complete", "completion", "run-batch", "batch", "llama-cli"), "generate"),
    **dict.fromkeys(("server", "api-server", "up", "deploy", "api", "llama-server", "start"), "serve"),
    **dict.fromkeys(("eval", "evaluate", "match", "arena", "tournament"), "selfplay --opponent-model"),
    **dict.fromkeys(("alphazero", "az", "rl"), "loop"),
    **dict.fromkeys(("ls", "list"), "models"),
    **dict.fromkeys(("info", "env", "collect-env", "check"), "doctor"),
    **dict.fromkeys(("help", "man"), "docs"),
    **dict.fromkeys(("new", "init", "scaffold"), "plugins new"),
    **dict.fromkeys(("onnx", "to-onnx", "convert"), "export"),
    **dict.fromkeys(("sweep", "compare"), "bench --compare"),
    "status": "fleet status",
    "install": "plugins install",
    "uninstall": "plugins uninstall",
    "version": "--version",
    "pull": FETCHED,
    "download": FETCHED,
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
    sentences = [ours for ours in FLAGS.get(plain, ()) if not ours.startswith("-")]
    for ours in FLAGS.get(plain, ()):
        first, _, rest = ours.partition(" ")
        if (name := _plain(rest.partition("=")[0] if first == "-B" else first)) in names:
            return _meant(names[name])
    if sentences:
        return sentences[0]
    holding = [name for name in names if plain in name.split("-")]  # `wait` is in `max_wait`
    near = holding[0] if len(holding) == 1 else nearest(plain, names, ALIKE)
    return _meant(names[near]) if near else ""


def command_hint(word: str) -> str:
    """The hint for a command of another program; "" where there is none."""
    found = COMMANDS.get(word.replace("_", "-"), "")
    return found if not found or found.endswith(".") else f"Did you mean 'gpuinfer {found}'?"


def _meant(ours: str) -> str:
    return f"Did you mean '{ours}'?"


def _plain(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()
