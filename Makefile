# The same verbs everywhere: make help lists them.
# Every target bootstraps .venv by itself; the only things a machine needs are Python 3.11+ and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# The tests start hundreds of Python processes: without compiled files they take twice as long.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install check test test-more test-spark41 test-peers demo demo-flink bench fault proto docs clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv comes from the machine when it has one, else from PyPI into the virtual environment itself.
$(READY): pyproject.toml uv.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v uv >/dev/null 2>&1; then \
		VIRTUAL_ENV=$(CURDIR)/$(VENV) uv sync --frozen --active --quiet --inexact; \
	else \
		test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv; \
		VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv sync --frozen --active --quiet --inexact; \
	fi
	@touch $@

install: kernels ## set up .venv with everything

# Compiled once per version of the kernels' sources; an instant when nothing changed.
.PHONY: kernels
kernels: $(READY)
	@$(BIN)/python -m zufluss.record.kernels

check: $(READY) ## lint, types, import direction, generated files current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m zufluss.config.docs --check docs/configuration.md
	$(BIN)/python -m zufluss.obs.metrics --check docs/metrics.md
	$(BIN)/python -m zufluss.cli.docs --check docs/cli.md
	$(BIN)/python -m zufluss.spark.docs --check docs/spark.md
	$(BIN)/python scripts/proto.py --check

test: kernels ## all tests, with a sample of each fault count
	$(BIN)/python scripts/readers.py
	$(BIN)/python scripts/spark_classes.py
	$(BIN)/pytest -n 4 --dist worksteal

test-more: kernels ## the second tier of CI: README on other Pythons, larger samples, Spark clusters
	$(BIN)/python -m scripts.newcomer 3.12 3.13
	ZUFLUSS_FAULT=more $(BIN)/pytest tests/log tests/kv tests/fault tests/fuzz tests/end_to_end/aggregation tests/end_to_end/leases tests/end_to_end/kv_scans -n 4 --dist worksteal --timeout 1200
	ZUFLUSS_FAULT=full $(BIN)/pytest tests/tiering/test_clusters.py tests/spark/test_masters.py -n 2 --timeout 1200

test-spark41: kernels ## the Spark tests once more, on Spark 4.1
	$(BIN)/python scripts/spark41.py

test-peers: kernels ## Fluss's Java and Rust clients and its Flink connector against zufluss dev (needs Maven Central; not part of CI)
	$(BIN)/python -m scripts.clients
	$(BIN)/python -m scripts.clients --tablet-servers 3
	$(BIN)/python -m examples.flink.run || test $$? -eq 3
	$(BIN)/python -m scripts.peers

demo: kernels ## a server, live tables, tiering to Iceberg on Spark, lake and tail read as one
	$(BIN)/python examples/demo.py

demo-flink: kernels ## Flink SQL on a server of ours (needs Java and Maven Central)
	$(BIN)/python -m examples.flink.run

bench: kernels ## measured ratios to the machine's own limits and to pyfluss
	$(BIN)/python -m bench

fault: kernels ## the full fault counts: crashes, power loss, fuzzing (long)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $$(command -v uv || echo $(BIN)/uv) sync --frozen --active --quiet --inexact --group fuzz
	ZUFLUSS_FAULT=full $(BIN)/pytest tests/fault tests/fuzz tests/log tests/end_to_end/test_mutated_requests.py tests/end_to_end/test_untrue_requests.py tests/end_to_end/test_kv_evolution.py tests/tiering/test_faults.py tests/tiering/test_clusters.py tests/end_to_end/leases tests/end_to_end/kv_scans tests/end_to_end/aggregation tests/spark tests/examples tests/tablet/scan/test_states.py tests/coordinator/remote/test_snapshot_retention.py -n 2 --timeout 3600
	for engine in versitygw minio; do if command -v $$engine; then \
		ZUFLUSS_S3_SERVER=$$engine ZUFLUSS_FAULT=full $(BIN)/pytest tests/log/shared/test_conformance.py tests/log/shared/test_faults.py tests/fault/shared_log/test_store_faults.py -n 2 --timeout 3600 || exit 1; \
	fi; done
	$(BIN)/python -m tests.fuzz.run

proto: $(READY) ## regenerate the protobuf messages
	$(BIN)/python scripts/proto.py

docs: $(READY) ## regenerate the pages of options, metrics and commands in docs/
	$(BIN)/python -m zufluss.config.docs docs/configuration.md
	$(BIN)/python -m zufluss.obs.metrics docs/metrics.md
	$(BIN)/python -m zufluss.cli.docs docs/cli.md
	$(BIN)/python -m zufluss.spark.docs docs/spark.md

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
