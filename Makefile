# `make demo` and `make test` need python3 (>= 3.10) and make, nothing else: each builds .venv when it is missing.
# Everything is installed inside .venv*; `make clean` removes it all.
#
#   make demo PYTHON=python3.12                  another interpreter
#   make test PYTEST_ARGS="-x tests/ir"          some of the tests
#   make demo TORCH="torch==2.13.0+cpu"          another build of torch, as your pip is configured to find it
#   make test-torch TORCH=torch==2.15.0          the tests with another release of torch, beside .venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
# A worker with one thread for each core: the tests are many and small.
PYTEST = OMP_NUM_THREADS=1 $(CURDIR)/$(1)/bin/python -m pytest -q -n auto --dist worksteal --maxprocesses 8

# The user's own site-packages and pip options must not leak into the environments.
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_USER := 0
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_CONSTRAINT

# torch is named in every install: pip then keeps it instead of resolving another one. Python compiles a module when it
# is first imported; pip would compile all 11,000 of them, half a minute for each environment.
INSTALL = $(1)/bin/python -m pip install --quiet --progress-bar off --no-compile "$(TORCH)"

.PHONY: help demo test test-all test-fast test-hf4 test-torch docs lint style format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a small MoE language model, original beside compiled; writes report.html"
	@echo "make test       the tests, with transformers 5"
	@echo "make test-all   also those that take long: every mutant, not a sample of them"
	@echo "make test-hf4   the model corpus with transformers 4.57, in an environment of its own"
	@echo "make test-torch TORCH=torch==2.15.0   the tests with that torch and its triton; PYTEST_ARGS=--each=25 for a sample"
	@echo "make docs       the documentation, in site/; warnings are errors"
	@echo "make lint       ruff and pyright"
	@echo "make format     what ruff can mend"
	@echo "make clean      remove the environments and caches"

demo: .venv/.moefx
	.venv/bin/python -m moefx demo $(DEMO_ARGS)

test: .venv/.test
	$(call PYTEST,.venv) -m "not exhaustive" $(PYTEST_ARGS)

test-all: .venv/.test
	$(call PYTEST,.venv) $(PYTEST_ARGS)

test-fast: .venv/.test
	$(call PYTEST,.venv) -m "not slow and not exhaustive" $(PYTEST_ARGS)

test-hf4: .venv-hf4/.test
	$(call PYTEST,.venv-hf4) -m hf tests/corpus $(PYTEST_ARGS)

# An environment for each release, so that they can be compared.
TORCH_VENV = .venv-$(subst =,,$(subst /,,$(TORCH)))

test-torch: $(TORCH_VENV)/.test
	$(call PYTEST,$(TORCH_VENV)) -m "not exhaustive" $(PYTEST_ARGS)

# Docstrings are read from the source: no torch in this environment, and no network once it exists.
docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

lint: style
	.venv/bin/pyright

style: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check moefx tests benchmarks examples

format: .venv/.test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format moefx tests benchmarks examples

clean:
	rm -rf .venv .venv-* site .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov

# Stamp files: an environment is touched again only when pyproject.toml changes.
%/.torch:
	@$(PYTHON) -c 'import sys; sys.exit("moefx needs Python 3.10 or newer, this is %s: make PYTHON=/path/to/python3" % sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	@echo "== $*: environment and $(TORCH) (once, a few minutes)"
	@$(PYTHON) -m venv $*
	@$(call INSTALL,$*)
	@touch $@

.venv/.moefx: .venv/.torch pyproject.toml
	@echo "== .venv: moefx"
	@$(call INSTALL,.venv) --editable .
	@touch $@

.venv/.test: .venv/.moefx
	@echo "== .venv: test tools and transformers 5.24"
	@$(call INSTALL,.venv) --editable ".[test,hf]"
	@touch $@

$(TORCH_VENV)/.test: $(TORCH_VENV)/.torch pyproject.toml
	@echo "== $(TORCH_VENV): test tools and transformers 5.24"
	@$(call INSTALL,$(TORCH_VENV)) --editable ".[test,hf]"
	@touch $@

.venv-hf4/.test: .venv-hf4/.torch pyproject.toml
	@echo "== .venv-hf4: test tools and transformers 4.57"
	@$(call INSTALL,.venv-hf4) --editable ".[test,hf4]"
	@touch $@

.venv-docs/.docs: pyproject.toml
	@echo "== .venv-docs: mkdocs"
	@$(PYTHON) -m venv .venv-docs
	@sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d , | xargs .venv-docs/bin/python -m pip install --quiet --progress-bar off
	@touch $@

.PRECIOUS: %/.torch
