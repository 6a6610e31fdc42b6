# Needs only Python 3.11 (with its venv module) and make. `make` or `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(firstword $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done))
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input -q
# Five times faster than pip; given pip's own registry and certificates. Where it finds no way to the registry, pip does the work.
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$($(PY) -m pip config get global.index-url 2>/dev/null || echo "$${PIP_INDEX_URL:-}")}" \
	SSL_CERT_FILE="$${SSL_CERT_FILE:-$${PIP_CERT:-}}" UV_HTTP_TIMEOUT=30 .venv/bin/uv pip install --python $(PY) --link-mode=copy
SAY = @printf '» %s\n'

# The environment belongs to this place, this lock and this project file: any other content is another stamp.
STAMP := .venv/.made-$(shell (pwd; cat requirements/dev.lock pyproject.toml) 2>/dev/null | cksum | cut -d' ' -f1)
COMPILE = .venv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
	--custom-compile-command "make lock" pyproject.toml

.PHONY: help venv up dev test soak e2e cluster-build lint fmt verify generate bench bench-cluster lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

venv: $(STAMP) ## make or refresh .venv from requirements/dev.lock
	@:

$(STAMP):
	@[ -n "$(PYTHON)" ] || { echo "No Python found: install Python 3.11 or newer, or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3.11-venv)" >&2; exit 1; }
	@[ "$$($(PY) -c 'import sys; print(sys.prefix)' 2>/dev/null)" = "$(CURDIR)/.venv" ] \
		|| { printf '» %s\n' "making .venv with $(PYTHON)"; rm -rf .venv; $(PYTHON) -m venv .venv; }
	$(SAY) "installing $$(grep -c '^[a-z].*==' requirements/dev.lock) locked packages (the first time takes a minute)"
	@awk '/^[a-z]/ {keep = /^uv==/} keep' requirements/dev.lock > .venv/uv.lock
	@$(PIP) install --no-deps --require-hashes -r .venv/uv.lock
	@$(UV) --no-deps --require-hashes -r requirements/dev.lock 2>.venv/uv.log \
		|| $(PIP) install --no-deps --require-hashes -r requirements/dev.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@rm -f .venv/.made-* && touch $@
	$(SAY) "environment ready: .venv"

up: venv ## run the example report agent, end to end, on this machine
	@$(PY) -m examples.report.demo

dev: venv ## gateway, Postgres and workers on this machine, for the report example
	@.venv/bin/perdure dev -f examples/report

test: venv lint verify cluster-build ## lint, generated files, then every test; the first time builds a cluster for them
	$(SAY) "tests"
	@$(PY) -m pytest -q -n 2 --max-worker-restart 0 --durations 15 --durations-min 20

soak: venv ## half an hour of load and faults on a stack of this machine, then a verdict; SECONDS=180 SEED=1 for another
	@$(PY) -m tests.soak --seconds $(or $(SECONDS),1800) $(if $(SEED),--seed $(SEED))

e2e: venv cluster-build ## the end-to-end tests alone, on a real cluster, without Docker
	@$(PY) -m pytest -q -n 0 tests/e2e

cluster-build: venv ## what a test cluster is made of, into the user's cache (the first time: a quarter of an hour)
	$(SAY) "test cluster"
	@$(PY) -m tests.cluster build

lint: venv ## ruff, formatting, types, layers
	$(SAY) "ruff"
	@.venv/bin/ruff check -q --output-format concise .
	@.venv/bin/ruff format -q --check .
	$(SAY) "mypy"
	@.venv/bin/mypy --no-error-summary
	$(SAY) "layers"
	@.venv/bin/lint-imports --no-logo >.venv/layers.log || { cat .venv/layers.log >&2; exit 1; }

fmt: venv ## format and fix what can be fixed
	@.venv/bin/ruff check -q --fix . || true
	@.venv/bin/ruff format -q .

verify: venv ## generated files still agree with their source
	$(SAY) "generated files"
	@$(PY) -m perdure_operator.cli.generate --check

generate: venv ## write the files that are generated from code
	@$(PY) -m perdure_operator.cli.generate

bench: venv ## benchmarks; results as JSON in bench/results
	@$(PY) -m bench

bench-cluster: venv cluster-build ## what a run costs on a real cluster, against a bare pod; results as JSON in bench/results
	@$(PY) -m bench.cluster

lock: venv ## choose the newest allowed versions anew
	$(SAY) "requirements/dev.lock (everything)"
	@$(COMPILE) --all-extras -U -o requirements/dev.lock
	$(SAY) "requirements/operator.lock, sidecar.lock, examples.lock (the same versions, for images)"
	@$(COMPILE) --extra operator -c requirements/dev.lock -o requirements/operator.lock
	@$(COMPILE) -c requirements/dev.lock -o requirements/sidecar.lock
	@$(COMPILE) --extra examples -c requirements/dev.lock -o requirements/examples.lock
	@! grep -nE '://' requirements/*.lock

clean: ## remove what tools made; keeps .venv
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find operator agent_sidecar tests -name __pycache__ -type d -prune -exec rm -rf {} +
