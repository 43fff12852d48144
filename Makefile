# README names what this needs of the system; everything else comes from pip, as your own pip configuration says.
# The Python of .venv: python3 where that is one of these, else the first of them that starts. PYTHON=... takes another.
PYTHONS := 3.11 3.12 3.13
IS_KNOWN := -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' $(PYTHONS)
# The last command succeeds: make takes the output of one that ends with 127 (not found) for an error message.
PYTHON ?= $(firstword $(shell for name in python3 $(PYTHONS:%=python%); do $$name $(IS_KNOWN) 2> /dev/null && echo $$name; done; true))
ARGS ?=
# Tests of whole runs leave a core idle while processes start and wait for each other: with two cores, two workers use it.
WORKERS ?= $(shell [ $$(nproc) -gt 1 ] && echo 2 || echo 0)

# The installed set is named by its contents, not by file times: a checkout changes those.
REQUIREMENTS := requirements/cpu.txt requirements/dev.txt
STAMP := .venv/installed-$(shell cat $(REQUIREMENTS) | cksum | cut -d' ' -f1)
# The commands (rl-train ...) of this checkout, where it lies: a checkout that was moved installs them anew.
COMMANDS := .venv/commands-$(shell { pwd -P; cat pyproject.toml; } | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help install demo real test test-all test-browser coverage lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo '  ARGS="..." is handed on: make demo ARGS="--dry-run", make test ARGS="tests/unit -k packing"'

install: $(COMMANDS) ## make .venv, with rl-train; does nothing when requirements/ and pyproject.toml have not changed since

demo: $(COMMANDS) ## train a tiny model by GRPO on this machine's CPU, in a few minutes
	.venv/bin/rl-train --config rl_grpo_qwen3_debug $(ARGS)

real: $(COMMANDS) ## get a real model of 135M parameters (93 MB) and train it on sums, on this machine's CPU
	.venv/bin/python scripts/get_model.py smollm2
	.venv/bin/rl-train --config rl_sums_smollm2 $(ARGS)

test: $(STAMP) ## the tests but those marked slow; WORKERS=0 runs one at a time
	.venv/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: test ## all tests, then the matrices that take longer than a change can wait (CONTRIBUTING.md lists them)
	.venv/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow
	.venv/bin/python -m tests.zoo
	.venv/bin/python -m tests.sabotage
	.venv/bin/python -m tests.sabotage --adapters
	.venv/bin/python -m tests.sabotage --experts
	.venv/bin/python -m tests.fake_step
	.venv/bin/python -m tests.fake_step --families
	.venv/bin/python -m tests.first_steps
	.venv/bin/python tests/resume_matrix.py --kills 10 --seed 0
	.venv/bin/python tests/kill_matrix.py --kills 40 --seed 0
	.venv/bin/python tests/soak.py --steps 1000
	.venv/bin/python tests/bare_machine.py

test-browser: $(STAMP) ## the report in a real Chromium, of the system
	@command -v chromium chromium-browser google-chrome > /dev/null || \
		{ echo 'no Chromium here: on Debian, apt-get install chromium; then again'; exit 1; }
	.venv/bin/python -m pip install -q --no-deps -r requirements/browser.txt
	.venv/bin/python -m pytest -q tests/browser $(ARGS)

coverage: $(STAMP) ## which lines and branches of the library the tests execute, in build/coverage; takes three times as long
	.venv/bin/python -m pip install -q --no-deps -r requirements/coverage.txt
	.venv/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-context=test $(ARGS)

lint: $(STAMP) ## ruff's checks and formatting, and mypy over the library and the fakes of the tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(ARGS)

format: $(STAMP) ## format the code, and fix what ruff can fix
	.venv/bin/ruff check --fix $(ARGS) .
	.venv/bin/ruff format $(ARGS) .

clean: ## remove caches and build leftovers; .venv and outputs/ stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# torch first and with its dependencies: where pip has only the CUDA build, that brings the libraries without which it can't be
# imported; where pip has a CPU build, it brings none. The pins then follow without dependencies (requirements/cpu.txt says why).
$(STAMP):
	@test -x .venv/bin/pip || $(or $(PYTHON),false) $(IS_KNOWN) 2> /dev/null || \
		{ echo "error: no Python 3.11, 3.12 or 3.13 (PYTHON = '$(PYTHON)'): install one, or name it: make PYTHON=/usr/bin/python3.13" >&2; exit 1; }
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	rm -f .venv/installed-*
	.venv/bin/python -m pip install $$(grep '^torch==' requirements/cpu.txt)
	.venv/bin/python -m pip install --no-deps -r requirements/cpu.txt
	.venv/bin/python -m pip install --no-deps -r requirements/dev.txt
	touch $@

# The build backend is one of the pins, so this downloads nothing.
$(COMMANDS): | $(STAMP)
	rm -f .venv/commands-*
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
