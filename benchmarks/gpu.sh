#!/usr/bin/env bash
# On a CUDA machine, all of this within ten minutes: the GPU tests; self-play at 1 to 16 workers, a model in each
# (inprocess) and one in a server for all of them (central); text generation at batch sizes from 1 up, and a diffusion
# model; data parallel over all devices, or one of them against two stand-ins on the CPU; a model in two stages; two models
# in turns and at once; memory, estimated beside measured; training with and without checkpointed layers; fragmentation.
# Needs no installation of gpuinfer itself.
#
#   benchmarks/gpu.sh [RESULTS]        default: benchmarks/results/gpu
#
#   PYTHON=python3.12   the interpreter, with a CUDA torch
#   SECONDS_IN_ALL=570  what it may take, from its start: what has no time left is shortened or skipped, and the table says so
#   PARTS=tests,memory  some of kernels, tests, selfplay, generation, diffusion, devices, stages, models, memory, training, fragmentation
#   DTYPE=float32       the number format; by default bfloat16
#   TEXT_MODEL=DIR      what generates: a Hugging Face folder; by default the built-in tiny one, which a GPU hardly feels
#   DIFFUSION_MODEL=DIR a masked diffusion model; by default the built-in tiny one
#   WHEELS=DIR          packages to add, as wheels (below)
#   DEVICE=cpu          tries the program itself where there is no GPU, with small counts: its table says so
#
# RESULTS gets gpu.md (one table), gpu.json (the same figures), and a JSON report and a log for each command. The exit
# code is 1 when a test or a command failed; the rest is still done. The aims that the table names: for Blob 4 × 5, 3 × 30,
# the 4.8 M network in bfloat16, `central` on one H200 with 16 cores 300,000 games/min, 100,000 as a first step; for
# generation 30 times as many tokens a second in batches as one row after another.
#
# A machine without a network: packages that it lacks travel as wheels. Where there is a network, for Python 3.12:
#   pip download --dest wheels --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux_2_31_x86_64 --platform manylinux2014_x86_64 -r benchmarks/gpu-packages.txt
# (With what they depend on, so that versions fit one another; torch is not among them.) Copy the folder over, and there:
# WHEELS=wheels.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 1
results=${1:-benchmarks/results/gpu}
python=${PYTHON:-python3}

site=$(mktemp -d) || exit 1
trap 'rm -rf "$site"' EXIT
child=
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 143' TERM INT # which ends what it had started, too
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
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
