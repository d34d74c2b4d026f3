#!/usr/bin/env bash
# On a CUDA machine: the GPU tests, then self-play at 1 to 16 workers, a model in each (inprocess) and one in a server for
# all of them (central), then text generation at batch sizes from 1 up, then a diffusion model. Needs no installation of
# gpuinfer itself.
#
# The aim, for Blob 4 × 5, 3 × 30, the 4.8 M network in bfloat16, `central` on one H200 with 16 cores: 300,000 games/min,
# 100,000 as a first step, with a mean batch over 4,096 rows. The table says what was reached of it.
#
# The aim for generation: 30 times as many output tokens a second in batches as one row after another. Each number of
# rows runs once as it is; the largest also without CUDA graphs, with torch.compile, and with --deterministic.
#
#   benchmarks/gpu.sh [RESULTS]        default: benchmarks/results/gpu
#
#   PYTHON=python3.12   the interpreter, with a CUDA torch
#   WORKERS="1 2 4"     which worker counts; by default 1 to 16, as far as there are cores
#   BACKENDS="central"  which backends; by default inprocess and central
#   DTYPES="bfloat16"   which number formats; by default float32 and bfloat16
#   GAMES=5000          games for each worker
#   TEXT_MODEL=DIR      what generates: a Hugging Face folder; by default the built-in tiny one, which a GPU hardly feels
#   BATCH_SIZES="1 64"  rows at once; by default 1 to 256
#   NEW_TOKENS=128      of each answer
#   DIFFUSION_MODEL=DIR a masked diffusion model; by default the built-in tiny one
#   LIMIT=300           seconds that one run may take
#   WHEELS=DIR          packages to add, as wheels (below)
#
# RESULTS gets gpu.md, generate.md and diffusion.md (the tables), tests.log and a JSON report and a log for each run. The exit code is 1 when a test
# or a run failed; the rest is still done.
#
# A machine without a network: packages that it lacks travel as wheels. Where there is a network, for Python 3.12:
#   pip download --dest wheels --only-binary=:all: --no-deps --python-version 3.12 --implementation cp \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux2014_x86_64 numba llvmlite msgpack platformdirs psutil pydantic pydantic-core \
#     pydantic-settings python-dotenv annotated-types typing-inspection rich markdown-it-py mdurl pygments \
#     safetensors typer shellingham click hypothesis sortedcontainers pytest pytest-timeout iniconfig pluggy nvidia-ml-py \
#     tokenizers jinja2 markupsafe llguidance msgspec tomlkit
# (--no-deps: with torch's own dependencies it would be gigabytes.) Copy the folder over, and there: WHEELS=wheels.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 1
results=$(mkdir -p "${1:-benchmarks/results/gpu}" && cd "${1:-benchmarks/results/gpu}" && pwd) || exit 1
python=${PYTHON:-python3}
games=${GAMES:-5000}
text_model=${TEXT_MODEL:-tiny}
new_tokens=${NEW_TOKENS:-128}
diffusion_model=${DIFFUSION_MODEL:-tiny-llada}
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

# Prompts of 16 to 255 words; eight times as many as there are rows at once, so that the ends of the run weigh little.
prompts() {
    "$python" - "$1" <<'PYTHON'
import json, random, sys

dice = random.Random(0)
for number in range(int(sys.argv[1])):
    print(json.dumps({"id": str(number), "prompt": " ".join(f"{dice.random():.2f}" for _ in range(dice.randrange(16, 256)))}))
PYTHON
}

# generate NAME ROWS DTYPE FLAG...; of `$model` where that is set, then named for `$kind`
generate() {
    local name=${kind:-generate}-$1 rows=$2 dtype=$3
    shift 3
    echo "gpu.sh: $name" >&2
    rm -f "$results/$name.jsonl"
    prompts $((8 * rows)) | timeout --signal INT --kill-after 30 "$limit" "$python" -m gpuinfer generate \
        --model "${model:-$text_model}" --input - --output "$results/$name.jsonl" --device cuda --dtype "$dtype" \
        --batch-size "$rows" --max-new-tokens "$new_tokens" --temperature 0 --ignore-eos "$@" \
        --no-live --json "$results/$name.json" 2>"$results/$name.log" ||
        { failed=1; tail -n 3 "$results/$name.log" >&2; }
    rm -f "$results/$name.jsonl"
}

largest=1
for rows in ${BATCH_SIZES:-1 8 16 32 64 128 256}; do
    largest=$((rows > largest ? rows : largest))
    for dtype in ${DTYPES:-float32 bfloat16}; do
        generate "$dtype-$rows-graphs" "$rows" "$dtype"
    done
done
for dtype in ${DTYPES:-float32 bfloat16}; do
    generate "$dtype-$largest-eager" "$largest" "$dtype" -B graphs=false
    generate "$dtype-$largest-compiled" "$largest" "$dtype" -B compile=true
    generate "$dtype-$largest-deterministic" "$largest" "$dtype" --deterministic
done

"$python" - "$results" "$text_model" <<'PYTHON' || failed=1
import json, pathlib, sys

AIM = 30  # times one row after another

results = pathlib.Path(sys.argv[1])
runs = {tuple(path.stem.split("-")[1:]): json.loads(path.read_text()) for path in results.glob("generate-*-*-*.json")}
rates = {run: report["throughput"].get("output_tokens_per_s") for run, report in runs.items()}
if not any(rates.values()):
    sys.exit("gpu.sh: not a single run generated anything; see the generate-*.log files")


def shown(value, form=",.0f"):
    return "–" if value is None else format(value, form)


def ratio(run):
    alone = rates.get((run[0], "1", "graphs"))
    return rates[run] / alone if alone and rates[run] else None


lines = [
    f"Model {sys.argv[2]}, prompts of 16 to 255 words.",
    "",
    "| dtype | rows at once | how | output tokens/s | input tokens/s | rows a step | over one row | device peak MB | status |",
    "|---|---|---|---|---|---|---|---|---|",
]
for run, report in sorted(runs.items(), key=lambda item: (item[0][0], int(item[0][1]), item[0][2])):
    throughput = report["throughput"]
    cells = [
        *run,
        shown(throughput.get("output_tokens_per_s")),
        shown(throughput.get("input_tokens_per_s")),
        shown((report.get("batches") or {}).get("rows_mean")),
        shown(ratio(run), ".1f"),
        shown((report.get("memory") or {}).get("device_peak_mb")),
        report["status"],
    ]
    lines.append(f"| {' | '.join(cells)} |")
best = max((value for value in map(ratio, runs) if value), default=None)
lines += ["", f"Over one row after another: {shown(best, '.1f')} times at the best, aim {AIM}."]
table = "\n".join(lines) + "\n"
(results / "generate.md").write_text(table)
print(table)
PYTHON

for rows in ${BATCH_SIZES:-1 16 64}; do
    for dtype in ${DTYPES:-float32 bfloat16}; do
        for how in low-confidence/none threshold/none threshold/prefix threshold/dual; do
            kind=diffusion model=$diffusion_model generate "$dtype-$rows-${how//[-\/]/_}" "$rows" "$dtype" \
                --decoder "${how%/*}" --cache "${how#*/}" --block-length 32
        done
    done
done

"$python" - "$results" "$diffusion_model" <<'PYTHON' || failed=1
import json, pathlib, sys

results = pathlib.Path(sys.argv[1])
runs = {tuple(path.stem.split("-")[1:]): json.loads(path.read_text()) for path in results.glob("diffusion-*-*-*.json")}
if not any(report["throughput"].get("output_tokens_per_s") for report in runs.values()):
    sys.exit("gpu.sh: not a single run of a diffusion model generated anything; see the diffusion-*.log files")

lines = [
    f"Model {sys.argv[2]}, prompts of 16 to 255 words, blocks of 32.",
    "",
    "| dtype | rows at once | decoder, cache | useful tokens/s | tokens a forward | computed anew | device peak MB | status | bottleneck |",
    "|---|---|---|---|---|---|---|---|---|",
]


def shown(value, form=",.0f"):
    return "–" if value is None else format(value, form)


for run, report in sorted(runs.items(), key=lambda item: (item[0][0], int(item[0][1]), item[0][2])):
    counted = report.get("unmasking") or {}
    cells = [
        *run,
        shown(report["throughput"].get("output_tokens_per_s")),
        shown(counted.get("tokens_per_forward"), ".2f"),
        shown(counted.get("computed_share"), ".0%"),
        shown((report.get("memory") or {}).get("device_peak_mb")),
        report["status"],
        report["bottleneck"]["class"],
    ]
    lines.append(f"| {' | '.join(cells)} |")
table = "\n".join(lines) + "\n"
(results / "diffusion.md").write_text(table)
print(table)
PYTHON
exit "$failed"
