# `make train` and `make test` work on a fresh clone with Python 3.11 to 3.14, make and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
SLICE ?= all
# Bytecode is kept even if the environment says otherwise: the tests start hundreds of processes that import Weft.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder $(FLAGS)

.PHONY: help train test sweep durations cluster-tools lint smollm gpu-wheels clean

# The first target, so that `make` alone runs it.
help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-20s %s\n", $$1, $$2 }'

train: $(VENV)/ready  ## the first run, within five minutes on two CPU cores
	$(BIN)/weft train

smollm: $(VENV)/ready  ## fine-tune SmolLM2-135M-Instruct; downloads the model once
	$(BIN)/python examples/fetch_smollm.py models/smollm2
	$(BIN)/weft train examples/smollm.toml

test: $(VENV)/ready-dev  ## the tests that every change must pass
	$(PYTEST)

# SLICE=2: one slice of three minutes; SLICE=2/8: the second of eight; SLICE=2 MINUTES=10: slices from the second on that end in
# ten minutes.
sweep: $(VENV)/ready-dev cluster-tools  ## all tests that are not in make test; SLICE=2 runs one slice
	$(PYTEST) --part sweep --slice $(SLICE) $(if $(MINUTES),--minutes $(MINUTES))

# FLAGS="tests/cli" measures the tests of one folder.
durations: $(VENV)/ready-dev cluster-tools  ## run all tests, and write their times to tests/durations.json
	$(PYTEST) --part all --record

# Debian packages of real schedulers, for tests of the sweep that are skipped without them.
CLUSTER_PACKAGES := slurm-wlm munge openmpi-bin openssh-server openssh-client faketime
CLUSTER_COMMANDS := slurmctld slurmd munged mpirun sshd ssh faketime
cluster-tools:  ## install Debian packages of real schedulers, for tests of the sweep
	@PATH="$$PATH:/usr/sbin"; missing=; \
	for tool in $(CLUSTER_COMMANDS); do command -v $$tool > /dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update --quiet --quiet && \
		DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends $(CLUSTER_PACKAGES); \
	then exit 0; fi; \
	echo "WARNING: tests with real schedulers will be SKIPPED: no$$missing. As root on Debian: apt-get install $(CLUSTER_PACKAGES)"

lint: $(VENV)/ready-dev  ## ruff, its formatter and mypy; and measures of the structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/house.py

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable .  # what is imported is compiled then
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@

# What benchmarks/gpu needs on a machine with Python 3.12 and torch for its accelerator that has no package registry:
# python -m pip install --no-index --no-deps --target SITE .gpu-wheels/*.whl, and SITE and src in PYTHONPATH.
gpu-wheels: $(VENV)/ready  ## download the packages that benchmarks/gpu needs on a machine without registry
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest .gpu-wheels \
		$$($(BIN)/python -m pip freeze | grep -iE '^(pydantic|pydantic_core|annotated-types|typing-inspection|tensorboardX|tomli_w|blake3)==') \
		liger-kernel==0.8.5

clean:  ## remove the environment, runs and models
	rm -rf $(VENV) runs models
