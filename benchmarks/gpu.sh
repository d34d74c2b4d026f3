#!/usr/bin/env bash
# On a CUDA machine: the GPU tests, then self-play at 1 to 16 workers, a model in each (inprocess) and one in a server for
# all of them (central). Needs no installation of gpuinfer itself.
#
# The aim, for Blob 4 × 5, 3 × 30, the 4.8 M network in bfloat16, `central` on one H200 with 16 cores: 300,000 games/min,
# 100,000 as a first step, with a mean batch over 4,096 rows. The table says what was reached of it.
#
#   benchmarks/gpu.sh [RESULTS]        default: benchmarks/results/gpu
#
#   PYTHON=python3.12   the interpreter, with a CUDA torch
#   WORKERS="1 2 4"     which worker counts; by default 1 to 16, as far as there are cores
#   BACKENDS="central"  which backends; by default inprocess and central
#   DTYPES="bfloat16"   which number formats; by default float32 and bfloat16
#   GAMES=5000          games for each worker
#   LIMIT=300           seconds that one run may take
#   WHEELS=DIR          packages to add, as wheels (below)
#
# RESULTS gets gpu.md (the table), tests.log and a JSON report and a log for each run. The exit code is 1 when a test
# or a run failed; the rest is still done.
#
# A machine without a network: packages that it lacks travel as wheels. Where there is a network, for Python 3.12:
#   pip download --dest wheels --only-binary=:all: --no-deps --python-version 3.12 --implementation cp \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux2014_x86_64 numba llvmlite msgpack platformdirs psutil pydantic pydantic-core \
#     pydantic-settings python-dotenv annotated-types typing-inspection rich markdown-it-py mdurl pygments \
#     safetensors typer shellingham click hypothesis sortedcontainers pytest pytest-timeout iniconfig pluggy nvidia-ml-py
# (--no-deps: with torch's own dependencies it would be gigabytes.) Copy the folder over, and there: WHEELS=wheels.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 1
results=$(mkdir -p "${1:-benchmarks/results/gpu}" && cd "${1:-benchmarks/results/gpu}" && pwd) || exit 1
python=${PYTHON:-python3}
games=${GAMES:-5000}
limit=${LIMIT:-300}
failed=0

site=$(mktemp -d) || exit 1
trap 'rm -rf "$site"' EXIT
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

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu.sh: torch sees no CUDA device. Run it on a machine with one; nvidia-smi tells whether the driver works." >&2
    exit 1
}

echo "gpu.sh: tests" >&2
"$python" -m pytest -m gpu tests -p no:cacheprovider 2>&1 | tee "$results/tests.log" >&2 || failed=1

cores=$(nproc)
for workers in ${WORKERS:-1 2 4 8 16}; do
    [ "$workers" -gt "$cores" ] && continue
    for dtype in ${DTYPES:-float32 bfloat16}; do
        for backend in ${BACKENDS:-inprocess central}; do # side by side: a warm device is not compared with a cold one
            name="blobnet-$dtype-$workers-$backend"
            echo "gpu.sh: $name" >&2
            timeout --signal INT --kill-after 30 "$limit" "$python" -m gpuinfer selfplay \
                --game blob --players 4 --cards 5 --determinizations 3 --simulations 30 \
                --model blobnet --device cuda --dtype "$dtype" --backend "$backend" \
                --workers "$workers" --games $((games * workers)) \
                --no-live --json "$results/$name.json" 2>"$results/$name.log" ||
                { failed=1; tail -n 3 "$results/$name.log" >&2; }
        done
    done
done

"$python" - "$results" <<'PYTHON' || failed=1
import json, pathlib, sys

AIM, FIRST_STEP, AIM_ROWS = 300_000, 100_000, 4096  # games/min; rows a batch

results = pathlib.Path(sys.argv[1])
runs = {path.stem: json.loads(path.read_text()) for path in results.glob("blobnet-*-*-*.json")}
if not runs:
    sys.exit("gpu.sh: not a single run left a report; see the .log files")


def number(report, *path, form=",.0f"):
    for key in path:
        report = (report or {}).get(key)
    return "–" if report is None else format(report, form)


first = next(iter(runs.values()))["environment"]
lines = [
    f"{first['device_name']}, {first['cpu_count']} CPU cores, Python {first['python']}, torch {first['torch']}.",
    "",
    "| dtype | workers | backend | games/min | simulations/s | evaluations/s | rows a batch | roofline rows/s | of it | device use | status | bottleneck |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
]


def place(name):
    _, dtype, workers, backend = name.split("-")
    return dtype, int(workers), backend


for name, report in sorted(runs.items(), key=lambda run: place(run[0])):
    cells = [
        *map(str, place(name)),
        number(report, "throughput", "games_per_min"),
        number(report, "throughput", "simulations_per_s"),
        number(report, "throughput", "evaluations_per_s"),
        number(report, "batches", "rows_mean"),
        number(report, "roofline", "rows_per_s"),
        number(report, "roofline", "efficiency", form=".0%"),
        number(report, "device", "utilisation", form=".0%"),
        report["status"],
        report["bottleneck"]["class"],
    ]
    lines.append(f"| {' | '.join(cells)} |")
best = max(runs.values(), key=lambda report: report["throughput"].get("games_per_min") or 0)
reached = best["throughput"].get("games_per_min") or 0
lines += [
    "",
    f"The fastest: {reached:,.0f} games/min ({best['backend']}, {best['environment']['dtype']}), {reached / AIM:.0%} of the"
    f" aim of {AIM:,}, {reached / FIRST_STEP:.0%} of the first step; {number(best, 'batches', 'rows_mean')} rows a batch,"
    f" aim {AIM_ROWS:,}.",
]
table = "\n".join(lines) + "\n"
(results / "gpu.md").write_text(table)
print(table)
PYTHON
exit "$failed"
