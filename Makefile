# make demo    set up .venv, then run examples/quickstart.py     (make demo DEMO_ARGS="--threshold 0.1 --steps 20")
# make test    set up .venv, then run the whole test suite       (make test PYTEST_ARGS="tests/test_readme.py -x")
# make lint    set up .venv, then run ruff and mypy
# make clean   remove .venv and the tools' caches
#
# PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
# CONSTRAINTS=        empty: take the newest torch and diffusers instead of the versions CI runs
# VENV=path           another environment; one that exists is used as it is, so give CONSTRAINTS= too if it holds a torch to keep

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= .ci/constraints.txt
DEMO_ARGS ?=
# Two processes: the suite is mostly Python that compiles, which one core does at a time; more need 1.5 GB each.
PYTEST_ARGS ?= -n 2 --dist worksteal

# No part of the suite or the demo asks a model hub for anything.
export HF_HUB_OFFLINE ?= 1

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.skip_attn_compile.installed

.PHONY: demo test lint install clean

demo: $(STAMP)
	$(RUN) examples/quickstart.py $(DEMO_ARGS)

test: $(STAMP)
	$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

install: $(STAMP)

# Reinstalled only when the requirements change: the install is editable, so the code itself is always current.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
