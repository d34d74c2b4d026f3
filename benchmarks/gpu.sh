#!/usr/bin/env bash
# What can be learnt on a CUDA machine within ten minutes, what matters most first:
#
#   versions    torch, cuDNN, numpy, numba, Triton; does numba compile; what `varlen_attn` takes; GB/s of copies of
#               pageable, pinned and registered shared memory; what another thread may do during a capture (wait for a
#               stream, copy, take memory, wait for the device); what an allocator does after a capture that fails
#   attention   torch's kernels one by one, first call and 20th, decoding 256 rows × 8 × 4 heads at 512 positions and
#               prompts of 20 lengths; a layer by our Triton kernels and by torch's, and how long ours take to compile
#   tests       the GPU tests (pytest -m gpu -W default --maxfail=15) but the one that compiles with torch
#   sanitizer   those of streams and weights with TORCH_CUDA_SANITIZER=1
#   blobnet     the bare network at 65,536 to 2,048 rows, eager and as a graph; a profile of a forward; with copies
#   batcher     gpuinfer.Batcher with 256 and 64 rows outstanding, on the host and on the device: the 4.9 M network, and a
#               convolution network on images; beside the bare model on such batches
#   kernels     compiles what searches and samples once, so that it is no other part's time
#   central     self-play, 16 workers, one server: 20,000 games at once and as many as it chooses, 4 and 2 batches in
#               flight; then 20,000 games to their end
#   text        a random Llama of 1 B made on the device, 256 rows and then 64: steps alone, greedy, top-p; a generator at
#               work; profiles of 20 decode steps and 5 of prompts
#   permuted    rows of a batch of 2,048 in another order, and rows of text: how many have the same bits
#   memory      estimated beside measured;  training: with all activations and with those of segments
#   stages      a model in two stages;  diffusion: a model that fills masks in
#
#   benchmarks/gpu.sh [RESULTS]           default: benchmarks/results/gpu
#   benchmarks/gpu.sh --pack FOLDER       where there is a network: gather the packages that travel, and say their size
#
#   PYTHON=python3.12   the interpreter, with a CUDA torch (tried for: Python 3.12, torch 2.11 for CUDA 13)
#   SECONDS_IN_ALL=570  what it may take, from its start. Each part gets its share of what is left and ends within it; what
#                       has no time left is shortened or skipped, and the table says so
#   PARTS=tests,text    some of the parts above
#   DTYPE=float32       the number format; by default bfloat16
#   TEXT_MODEL=DIR      what part kernels generates with: a Hugging Face folder; by default the built-in tiny one
#   DIFFUSION_MODEL=DIR a masked diffusion model; by default the built-in tiny one
#   WHEELS=DIR          packages to add, as --pack gathers them
#   DEVICE=cpu          tries the program itself where there is no GPU, with small counts: the table says so, and what
#                       needs CUDA says "no CUDA device", which is no failure
#
# A process is started for each part of probes, and for each command of the others. RESULTS gets gpu.md (one table) and
# gpu.json (the same figures), both written anew with each finding, so that a run that is cut off keeps what it has found;
# and commands/, what commands wrote: logs, reports, findings line by line, profiles. That folder is packed into
# commands.tar.gz at the end. The exit code is 1 when a test, a probe or a command failed; the rest is still done.
#
# To a machine without a network travel this repository, which needs no installation there, and the wheels of
# gpu-packages.txt: `--pack` downloads them for Python 3.12, and refuses when wheels and repository together are larger
# than 64 MiB. torch, Triton, numpy, numba and llvmlite are the machine's own. Of the wheels those are used whose package the
# machine lacks, or has in a version that does not fit. There: WHEELS=FOLDER benchmarks/gpu.sh
set -uo pipefail

python=${PYTHON:-python3}
if [ "${1:-}" = --pack ]; then
    exec "$python" "$(dirname "$0")/gpu_wheels.py" pack "${2:?into which folder?}"
fi
given=${1:-benchmarks/results/gpu}
results=$(realpath -m "$given") # of the folder it is started in, as WHEELS is
[ $# -gt 0 ] || results=$(realpath -m "$(dirname "$0")/../$given")
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
cd "$(dirname "$0")/.." || exit 1

site=$(mktemp -d) || exit 1
child=
ended() { # few files, and those of commands in one, without the positions that were trained on
    rm -rf "$results/commands/positions"
    if [ -d "$results/commands" ] && tar -czf "$results/commands.tar.gz" -C "$results" commands; then
        rm -rf "$results/commands"
    fi
    rm -rf "$site"
}
trap ended EXIT
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 143' TERM INT # which ends what it had started, too
if [ -n "$wheels" ]; then
    "$python" benchmarks/gpu_wheels.py unpack "$wheels" "$site" || exit 1
fi
# After the repository and before anything installed; exported, since worker processes need it too.
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"

# Plugins are found by entry point, in a package's metadata; a plain checkout has none yet.
"$python" - "$site" <<'PYTHON' || exit 1
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1]) / f"gpuinfer-{project['version']}.dist-info"
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gpuinfer\nVersion: {project['version']}\n")
groups = {"console_scripts": project["scripts"], **project["entry-points"]}
(folder / "entry_points.txt").write_text(
    "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items())
)
PYTHON

"$python" benchmarks/gpu.py "$results" --device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}" \
    --seconds "$((${SECONDS_IN_ALL:-570} - SECONDS))" ${PARTS:+--parts "$PARTS"} ${TEXT_MODEL:+--text-model "$TEXT_MODEL"} \
    ${DIFFUSION_MODEL:+--diffusion-model "$DIFFUSION_MODEL"} &
child=$!
wait "$child"
