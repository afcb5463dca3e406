# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := constraints.txt requirements.txt requirements-dev.txt
# What looks at the pins; not among them, since nothing of Oobleck is made or run by these.
TOOLS := uv==0.13.9 cyclonedx-bom==7.5.0 pip-audit==2.10.1
PACKAGES := core planner proto host master agent worker cli
# Twice the cores of a small machine: with so many, a run keeps both of its cores busy.
TEST_PROCESSES ?= 4
GENERATED := proto/control_pb2.py proto/control_pb2.pyi proto/control_pb2_grpc.py

# Tests start hundreds of processes, and each would compile all modules of the project anew.
test test-nccl soak: export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-nccl soak replay bench lint proto proto-check proto-lock docs lock sbom audit arm64 clean

# The stamp is older than its inputs after an edit of them, and only then installs again.
setup: $(VENV)/.installed
# All but torch is checked by its hash; what is not in the pins yet comes with torch.
$(VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --require-hashes --only-binary :all: --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m bench.demo

# How long each test took is in build/tests.xml. SHUFFLE=SEED (or "new") runs the files in another order.
# A process of pytest-xdist's that dies ends the run: with a new one in its place it may never end.
test: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 \
		--durations 15 --junitxml build/tests.xml $(if $(SHUFFLE),--shuffle $(SHUFFLE))

# What real workers do, over a fake of NCCL in the place of links.
test-nccl: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 \
		--transport nccl tests/worker/step tests/worker/recovery tests/worker/checkpoint \
		tests/worker/preparation

# Hours of what 'make test' has minutes of.
soak: setup
	SIMULATION_SEEDS=5000 $(BIN)/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1 \
		tests/simulation
	$(BIN)/python -m pytest --numprocesses 3 --dist load --maxschedchunk 1 -m soak tests/fault
	$(BIN)/python -m pytest -m soak tests/fuzz
	$(BIN)/python -m pytest -m soak tests/cli tests/deploy
	$(BIN)/python -m pytest -m soak tests/worker tests/cluster tests/gpu tests/master tests/planner tests/core
	$(BIN)/python -m bench.soak

# What happened in one seed of the simulation, as in `make replay SEED=7`. Its modules load gRPC before
# oobleck can say which TLS it speaks.
replay: setup
	PYTHONPATH=tests:. GRPC_SSL_CIPHER_SUITES=ECDHE-RSA-AES256-GCM-SHA384 \
		$(BIN)/python -m simulation.drill $(SEED)

bench: setup
	$(BIN)/python -m bench.recovery
	$(BIN)/python -m bench.throughput
	$(BIN)/python -m bench.sums
	$(BIN)/python -m bench.meeting
	$(BIN)/python -m bench.changes
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.detection
	$(BIN)/python -m bench.master_scale

# mypy reads the packages through a tree of links, since it does not follow editable installs.
build/links: Makefile
	mkdir -p $@/oobleck
	for package in $(PACKAGES); do ln -sfn ../../../$$package $@/oobleck/$$package; done
	for module in oobleck/*; do ln -sfn ../../../$$module $@/$$module; done
	touch $@

lint: setup build/links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/links && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p oobleck
	$(BIN)/mypy bench

# protoc sees the folders under their import names, so that the generated imports are right.
proto: setup build/links
	cd build/links && ../../$(BIN)/python -m grpc_tools.protoc -I . \
		--python_out=. --pyi_out=. --grpc_python_out=. oobleck/proto/control.proto

proto-check: proto
	git diff --exit-code -- $(GENERATED)

# What releases say to each other; INTENDED=1 also where one of before would misread it
# (docs/contributing.md).
proto-lock: setup
	cd tests && ../$(BIN)/python -m support.wire $(if $(INTENDED),--intended)

build/tools/.installed: Makefile
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet $(TOOLS)
	touch $@

# To take another version: `.venv/bin/pip install NAME==VERSION`, then this, which asks the package index.
lock: setup build/tools/.installed
	cd tests && ../$(BIN)/python -m support.pins

# What a user's installation consists of, for CycloneDX's readers, in build/sbom.json.
sbom: build/tools/.installed
	{ cat requirements.txt; grep '^torch==' constraints.txt; } | build/tools/bin/cyclonedx-py requirements \
		--pyproject pyproject.toml --output-reproducible --output-file build/sbom.json -

# Known vulnerabilities of the pins, in build/audit.json. It asks pypi.org's index of advisories, or
# osv's with ADVISORIES=osv; so CI does not depend on it. Pins that the index does not know are named.
# Its own exit code is 1 if it found some, and if it failed: then there is no file.
ADVISORIES ?= pypi
audit: build/tools/.installed
	@rm -f build/audit.json
	@build/tools/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip \
		--vulnerability-service $(ADVISORIES) --progress-spinner off --format json \
		--output build/audit.json 2> build/audit.log || test -s build/audit.json || { \
		tail -n 1 build/audit.log; echo "nothing was looked up: run it where the index of advisories \
	($(ADVISORIES)) answers"; exit 1; } >&2
	@build/tools/bin/python tests/support/audit.py build/audit.json $(ADVISORIES)

# Whether every pin has a wheel for arm64 (GH200, GB200) with glibc 2.28. It asks the package index, and
# downloads no package.
arm64: setup
	$(BIN)/pip install --dry-run --quiet --no-deps --ignore-installed --target build/arm64 \
		--only-binary :all: --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
		--platform manylinux2014_aarch64 --requirement constraints.txt

# Into build/site; a link that leads nowhere is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist *.egg-info demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
