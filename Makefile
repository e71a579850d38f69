# Every target creates and repairs .venv itself; a second run is quick.
.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
FILE ?= deploy/samples/01-minimal.yaml
PORT ?= 8000
PACKAGES := proto worker router operator cli bench

# What the other targets need: made when its sources are newer, or when the interpreter in .venv
# no longer runs, as after an upgrade of Python.
INSTALLED := .venv/.installed
ifneq ($(shell $(BIN)/python -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(INSTALLED)
endif

.PHONY: help setup up test test-unit test-integration test-processes test-operator test-e2e cluster cluster-binaries check format protos crds images lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Create or repair .venv from requirements.lock
	@sh deploy/dev/setup.sh

$(INSTALLED): pyproject.toml requirements.lock deploy/dev/setup.sh
	@sh deploy/dev/setup.sh

up: $(INSTALLED) ## Serve deploy/samples/01-minimal.yaml (or FILE=...) on this machine, port 8000 (or PORT=...)
	@exec $(BIN)/kvasir up -f "$(FILE)" --port "$(PORT)"

test: test-unit test-integration test-e2e ## Run every test that needs no GPU

test-unit: $(INSTALLED) ## Run the pure tests: seconds
	@$(BIN)/python -m pytest tests/unit

# Those of the operator wait most of the time, for windows and deadlines: beside the others they cost little.
OPERATOR_TESTS := tests/integration/operator

test-integration: $(INSTALLED) ## Run the tests with real processes on loopback
	@$(MAKE) --no-print-directory --jobs=2 test-processes test-operator

test-processes: $(INSTALLED) # All of them but the operator's
	@$(BIN)/python -m pytest tests/integration --ignore=$(OPERATOR_TESTS)

test-operator: $(INSTALLED) # The operator's, against a real control plane
	@$(BIN)/python -m pytest $(OPERATOR_TESTS)

test-e2e: $(INSTALLED) ## Run the whole stack on the real model
	@$(BIN)/python -m pytest tests/e2e

cluster: $(INSTALLED) ## Start a cluster with a real node and Kvasir on it, until Ctrl-C (root; ARGS=--without-kvasir)
	@PYTHONPATH=tests exec $(BIN)/python -m cluster $(ARGS)

cluster-binaries: $(INSTALLED) ## Find or build the Kubernetes that tests run against (once: 10-20 minutes)
	@PYTHONPATH=tests $(BIN)/python -m cluster.binaries

check: $(INSTALLED) ## Format, lint, types, layers, generated files up to date
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy $(PACKAGES) tests
	@$(BIN)/lint-imports
	@sh deploy/dev/check-generated.sh

format: $(INSTALLED) ## Format, and mend what the linter can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: $(INSTALLED) ## Generate the protobuf stubs
	@sh deploy/dev/protos.sh

crds: $(INSTALLED) ## Generate the CustomResourceDefinitions from the typed resources
	@$(BIN)/python -m kvasir.operator.crd charts/kvasir/crds

images: ## Build the images of operator, router and worker (needs buildah; REGISTRY=... and BASE=... work)
	@sh deploy/docker/build.sh

lock: $(INSTALLED) ## Resolve dependencies anew into requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
	    --extra local --group dev --custom-compile-command "make lock" \
	    pyproject.toml -o requirements.lock

clean: ## Remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache
