# Everything a person or CI types. `make help` lists it.
PYTHON ?= python3
VENV := .venv
FRAMEWORKS := .venv-frameworks
BIN := $(VENV)/bin
GPU_PYTHON ?= $(BIN)/python
# Not 2.13.0+cpu, which torchvision, as PyPI has it, does not go with.
TORCH ?= torch===2.13.0
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

# Some containers set it. Each of the suite's hundreds of processes would compile all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help up compose-env release check quick docs test test-all test-diagnosis test-security test-journeys test-faults test-clusters test-frameworks image-test gpu lint format bench screenshots response-types lock suite suite-all scripts

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

up: $(VENV)/.installed ## Start server and worker, and print a sign-in link
	@exec $(BIN)/halfstep up

compose-env: .env ## Write .env with a password for docker compose's PostgreSQL, once

.env:
	@umask 077; $(PYTHON) -c 'import secrets; print(f"POSTGRES_PASSWORD={secrets.token_hex(24)}")' > $@

release: ## Make wheels, hashes, bills of materials and an audit in dist/; fails where none can be had
	@PYTHON=$(PYTHON) sh .ci/release

check: $(VENV)/.installed-test ## Run lint, types, import contracts and the quick tests: about a minute
	@$(TOGETHER) quick scripts $(LINTS)

test: $(VENV)/.installed-test ## Run lint, types, import contracts and the tests that CI runs: about ten minutes on two cores
	@$(TOGETHER) suite scripts $(LINTS)

test-all: $(VENV)/.installed-test ## Run every test, on both databases and with all browser tests: an hour or more
	@$(TOGETHER) suite-all scripts $(LINTS)

# At once, on both cores; whatever of them fails, the others go on and tell too.
TOGETHER = $(MAKE) --no-print-directory --jobs=2 --keep-going

quick:
	$(BIN)/pytest -m 'not slow and not extended' --database sqlite --numprocesses 2 --dist loadgroup -q

suite:
	$(BIN)/pytest -m 'not extended' --numprocesses 3 --dist loadgroup --durations 30

suite-all:
	$(BIN)/pytest --hypothesis-profile all --numprocesses 3 --dist loadgroup --durations 30

scripts:
	$(BIN)/node --import ./tests/app/static/names.js --test --test-reporter=dot 'tests/app/static/*.test.js'

# Send the whole API 40,000 requests that nobody would, on both databases, and watch the server's memory
test-security: $(VENV)/.installed-test
	HALFSTEP_FUZZ_ROUNDS=20 $(BIN)/pytest tests/app/http/test_fuzz.py --numprocesses 2

# Run an operator's jobs on live installations, by the documented commands, on both databases
test-journeys: $(VENV)/.installed-test
	HALFSTEP_FAULTS=full $(BIN)/pytest tests/journeys tests/app/auth/test_access_matrix.py --numprocesses 2

# Train the whole corpus of tests/diagnosis, watched and unwatched, and compare what is diagnosed with the truth
test-diagnosis: $(VENV)/.installed-test
	HALFSTEP_DIAGNOSIS=full $(BIN)/pytest tests/diagnosis --numprocesses 2 --dist loadgroup

# Break everything on purpose, as often as it takes, then all workers and the browser on both databases; over an hour
test-faults: $(VENV)/.installed-test
	HALFSTEP_FAULTS=full HALFSTEP_COLD=yes $(BIN)/pytest tests/faults tests/e2e tests/worker tests/halfstep/session tests/halfstep/watching/test_watch.py tests/app/test_commands.py tests/app/test_servers.py tests/examples

# Train over three network namespaces, by a real Slurm and a real Ray, and break them; 3 GiB into buckets; minutes (Debian, root)
test-clusters: $(VENV)/.installed-test
	@sh .ci/system-packages munged:munge slurmctld slurmd srun:slurm-client ip:iproute2
	@$(PIP) --editable '.[buckets,ray]'
	HALFSTEP_CLUSTERS=yes $(BIN)/pytest tests/clusters tests/faults/test_buckets.py tests/db/files/test_buckets.py tests/app/files/test_bucket_downloads.py

# A CUDA device, or `cpu`: everything at small sizes, to try it out.
GPU_DEVICE ?= cuda
ifeq ($(GPU_DEVICE),cpu)
GPU_SIZES := --device cpu --small
else
GPU_SIZES := --device $(GPU_DEVICE)
GPU_CORPUS := HALFSTEP_DIAGNOSIS=full
endif
GPU_PARTS := gpu-performance gpu-launches gpu-tests gpu-corpus gpu-precision-diff gpu-worker
.PHONY: gpu-device $(GPU_PARTS)

gpu: ## On a CUDA machine, run what only such a machine can show (GPU_PYTHON=python3: another torch)
	@$(MAKE) --no-print-directory --jobs=1 --keep-going $(GPU_PARTS)

$(GPU_PARTS): gpu-device

gpu-device:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit("$(GPU_DEVICE)" != "cpu" and not torch.cuda.is_available() and "There is no usable CUDA device here.")'

# Step times of PyTorch's AMP recipe, with nothing else on the machine: 4 minutes at most
gpu-performance:
	$(GPU_PYTHON) -m benchmarks.gpu_performance $(GPU_SIZES)

# Kernels, copies and waits a step
gpu-launches:
	$(GPU_PYTHON) -m benchmarks.gpu_launches $(GPU_SIZES)

# A minute in eight processes, which pytest-xdist allows where it is installed
gpu-tests:
	HALFSTEP_GPU_TESTS_DEVICE=$(GPU_DEVICE) $(GPU_PYTHON) -m pytest tests/gpu --confcutdir=tests/gpu -W default -p no:cacheprovider \
	  $$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && test $(GPU_DEVICE) != cpu && echo --numprocesses 8)

# The corpus of tests/diagnosis in slices of two minutes at most (SLICE=3/8: one of them)
gpu-corpus:
	$(GPU_CORPUS) HALFSTEP_DIAGNOSIS_DEVICE=$(GPU_DEVICE) $(GPU_PYTHON) -m tests.diagnosis.slices $(if $(SLICE),--slice $(SLICE))

gpu-precision-diff:
	$(GPU_PYTHON) -m benchmarks.gpu_precision_diff $(GPU_SIZES)

gpu-worker:
	$(GPU_PYTHON) -m pytest tests/worker/test_warm_start.py tests/worker/sandbox --database sqlite -W default

# Watch seventeen frameworks, train `images` and `finetune`, in an environment of its own (TORCH=torch==2.8.0: another torch)
test-frameworks:
	@test -x $(FRAMEWORKS)/bin/pip || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/pip install --quiet --editable './halfstep[recipe]' '$(TORCH)' pytest lightning accelerate transformers timm ultralytics keras deepspeed scikit-learn torchvision pillow psutil safetensors peft trl hydra-core optuna pytorch-ignite skorch fastai monai stable-baselines3 torch_geometric
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks --confcutdir=tests/frameworks -W default -p no:cacheprovider

# Build both images and train a run in them (Debian, root)
image-test: $(VENV)/.installed-test
	@sh .ci/system-packages buildah debootstrap
	$(BIN)/python -m tests.images.builder
	unshare --net $(BIN)/pytest tests/images/trial.py

lint: $(VENV)/.installed-test ## Run lint, types and import contracts alone
	@$(TOGETHER) --output-sync $(LINTS)

LINTS := lint-types lint-code lint-format lint-imports lint-design lint-scripts lint-compose lint-spelling
.PHONY: $(LINTS)

lint-types:
	$(BIN)/mypy

lint-code:
	$(BIN)/ruff check .

lint-format:
	$(BIN)/ruff format --check .

lint-imports:
	$(BIN)/lint-imports

lint-design:
	$(BIN)/python .ci/design_limits.py

lint-scripts:
	$(BIN)/node .ci/node_modules/typescript/bin/tsc
	$(BIN)/node .ci/node_modules/eslint/bin/eslint.js --config .ci/eslint.config.mjs app/static tests/app/static
	$(BIN)/node .ci/node_modules/prettier/bin/prettier.cjs --check --log-level warn $(FORMATTED)

# By prettier
FORMATTED := 'app/static/**/*.{js,css}' 'tests/**/*.js' '.ci/*.mjs'

format: $(VENV)/.installed-test ## Format Python, scripts and styles
	$(BIN)/ruff format .
	$(BIN)/node .ci/node_modules/prettier/bin/prettier.cjs --write --log-level warn $(FORMATTED)

lint-compose:
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

lint-spelling:
	$(BIN)/codespell app db deploy docs examples halfstep trainer worker *.md

docs: $(VENV)/.installed-test ## Build a static site of docs/ in site/
	$(BIN)/zensical build --clean --strict

bench: $(VENV)/.installed-test ## Run every benchmark and print one table
	$(BIN)/python -m benchmarks

# Take the README's pictures from the running product
screenshots: $(VENV)/.installed-test
	$(BIN)/python -m tests.e2e.screenshots

# Generate the client's types of responses from the server's schemas
response-types: $(VENV)/.installed-test
	$(BIN)/python .ci/response_types.py > response_types.new && mv response_types.new halfstep/api_client/response_types.py

lock: $(VENV)/.installed-test ## Write the installed versions to constraints.txt
	@sh .ci/lock > constraints.new && mv constraints.new constraints.txt

$(VENV)/.installed: pyproject.toml halfstep/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Halfstep needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	@$(PIP) torch
	@$(PIP) --editable ./halfstep --editable '.[worker]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed .ci/system-packages .ci/package-lock.json
	@sh .ci/system-packages
	@$(PIP) --editable ./halfstep --editable '.[test]'
	@$(BIN)/npm ci --prefix .ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@
