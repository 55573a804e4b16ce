# Every target does its own set-up: a virtual environment in this folder, PyTorch in it, graphpp and its tools.
#
#   make demo                     train a Llama on two processes and compare it with one
#   make quick                    a first minute: one process, every package
#   make test                     tests of every kind, on JOBS processes
#   make test-all                 all cases of every kind, with 2,000 random programs in place of 8
#   make lint | types             ruff | mypy
#   make house                    print the packages, their imports, upward arrows and circles
#   make models                   run the models of tests/zoo, and write benchmarks/tried and the pages of models
#   make tutorials                run the tutorials of docs/tutorials/, and write their scripts and outputs (PAGES="llama mesh")
#   make museum                   run the public complaints of examples/museum and write docs/museum.md and docs/museum/
#   make docs                     build the site of docs/ into site/; a warning or a dead link is an error
#   make options                  write docs/options.md and docs/options/ from the declarations of the options
#   make compat TORCH=2.15.0      the tests in a second environment, with that version of PyTorch
#   make release                  build wheel and sdist into dist/, check them, print their hashes; publishes nothing
#   make clean                    remove the files that these targets made
#
# Variables: PYTHON (python3), VENV (.venv), TORCH (2.13.0), RANKS (2), JOBS (2), DEMO_ARGS, MUSEUM_ARGS, PYTEST_ARGS, PAGES.
#
# PyTorch: a torch that can already be imported is kept, in VENV or from the machine's own packages. Otherwise the set-up asks
# pip for torch==$(TORCH) by its plain version. pip then takes a build for CPUs ("+cpu" sorts above the plain version) from an
# index or folder that the machine has configured (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf); without such a
# configuration it takes the registry's own build, which runs without a GPU as well. So no server is named here.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: demo quick test test-all house models tutorials museum options docs lint types compat release clean help setup

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
RANKS ?= 2
JOBS ?= 2
DEMO_ARGS ?=
MUSEUM_ARGS ?=
PYTEST_ARGS ?=
PAGES ?=
EXACT ?=
override PY := $(VENV)/bin/python
override PIP := $(PY) -m pip --disable-pip-version-check install -qq
override READY := $(VENV)/.graphpp-ready
override SITE := .venv-docs
export OMP_NUM_THREADS := 1

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(READY)
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_llama.py $(DEMO_ARGS)

quick: $(READY)
	@$(PY) -m tests.quick $(PYTEST_ARGS)

test: $(READY)
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-all: $(READY)
	@GRAPHPP_FUZZ=2000 $(PY) -m pytest -q -m "" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

house: $(READY)
	@$(PY) -m tests.house

models: $(READY)
	@$(PY) -m tests.zoo
	PYTHONPATH=. $(PY) benchmarks/model_pages.py

tutorials: $(READY)
	@$(PY) website/tutorials.py $(PAGES)

museum: $(READY)
	@$(PY) examples/museum --jobs $(JOBS) --write $(MUSEUM_ARGS)

options: $(READY)
	@$(PY) -m graphpp.options.document docs

docs: $(SITE)/.graphpp-ready
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build -q -f website/mkdocs.yml
	@echo "open site/index.html"

lint: $(READY)
	@$(PY) -m ruff check .

types: $(READY)
	@$(PY) -m mypy

compat:
	@$(MAKE) --no-print-directory test VENV=.venv-$(TORCH) EXACT=1

release:
	@bash .ci/release "$(PYTHON)"

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find graphpp tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

setup: $(READY)

# The site is made from the text of the sources, so its environment has no torch. An environment that is not complete starts anew.
$(SITE)/.graphpp-ready: pyproject.toml
	@echo "set-up: $(SITE)"
	"$(PYTHON)" -m venv --clear $(SITE)
	$(SITE)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' |
	  $(SITE)/bin/python -m pip --disable-pip-version-check install -qq -r /dev/stdin
	touch $@

# EXACT (compat) asks for exactly the version TORCH: the machine's own torch is then ignored.
$(READY): pyproject.toml Makefile
	@fail() { echo "set-up: $$*" >&2; exit 1; }
	supported() { "$$1" -c 'import torch, re; v = re.match(r"(\d+)\.(\d+)", torch.__version__)
	raise SystemExit(not (2, 11) <= tuple(map(int, v.groups())) < (2, 16))' 2>/dev/null; }
	if ! test -x $(PY); then
	  command -v "$(PYTHON)" >/dev/null || fail "no '$(PYTHON)'; install Python 3.11 or newer, or name it: make PYTHON=..."
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
	    fail "'$(PYTHON)' is $$("$(PYTHON)" --version); 3.11 or newer is needed: make PYTHON=python3.12"
	  own=; if test -z "$(EXACT)" && supported "$(PYTHON)"; then own=--system-site-packages; fi
	  echo "set-up: $(VENV) from $$("$(PYTHON)" --version) $$own"
	  "$(PYTHON)" -m venv $$own $(VENV) || { rm -rf $(VENV)
	    fail "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; }
	fi
	have() { $(PY) -c 'import torch; from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true; }
	if test -n "$(EXACT)"; then
	  case "$$(have)" in "$(TORCH)"|"$(TORCH)+"*) ;; *) echo "set-up: installing torch $(TORCH); the first time takes minutes"; $(PIP) "torch==$(TORCH)" ;; esac
	elif ! supported $(PY); then
	  echo "set-up: installing torch $(TORCH); the first time takes minutes"
	  $(PIP) "torch==$(TORCH)"
	fi
	echo "set-up: installing graphpp and its tools beside torch $$(have)"
	echo "torch==$$(have)" > $(VENV)/constraints.txt
	$(PIP) setuptools wheel
	$(PIP) --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@
