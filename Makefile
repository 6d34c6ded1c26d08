# Start with these two: `make demo` trains a real model on this machine, `make test` runs the tests. Both install what
# they need.
PYTHON ?= python3
UV := .tools/bin/uv
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --durations=40
export UV_LINK_MODE ?= hardlink
# The tests start hundreds of processes; without byte code, each would compile Paceline again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test test-long test-cluster lint lint-types lint-others bench bench-cluster cluster cluster-down lock picture dist clean

setup: .venv/dev

$(UV): requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

.venv/bin/python: $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv

# What the demo needs: TensorFlow and the digit images, not the other frameworks.
.venv/demo: .venv/bin/python requirements/demo.txt pyproject.toml
	test -e .venv/dev || $(UV) pip sync --quiet --python .venv --require-hashes requirements/demo.txt
	$(UV) pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
	@touch $@

# Everything: all frameworks and development tools. They are imported here, so that Python compiles what tests import: if
# many processes did this at the same time, it would take a minute, and tests of hang detection would fail.
.venv/dev: .venv/bin/python requirements/dev.txt pyproject.toml
	$(UV) pip sync --quiet --python .venv --require-hashes requirements/dev.txt
	@TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -c 'import tensorflow, tf_keras, tensorboard.main' 2> /dev/null & \
	$(BIN)/python -c 'import jax, optax, torch._inductor.compile_fx, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run' && \
	wait $$!
	$(UV) pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/demo
	$(BIN)/paceline run examples/digits/job.yaml

# For use during development: starts no process. More processes than cores: some tests wait.
check: lint
	$(PYTEST) -n 3 --dist worksteal -m "not long" tests/unit

# Tests each behavior once, with real frameworks. Needs Linux, Python, make and git, nothing else.
test: lint
	$(PYTEST) -n 3 --dist loadgroup --ignore tests/cluster -m "not long"

# Hundreds of faults, repeated kills, the same with other frameworks, and everything that needs an object store, which is
# built the first time. Needs root, Go, npm, tmux and a C compiler.
test-long: .venv/dev
	$(PYTEST) -n 3 --dist loadgroup --ignore tests/cluster -m "long or generated" --hypothesis-profile more

# Not together with the other tests: frameworks start so slowly there that tests of hang detection would fail. Needs root.
test-cluster: .venv/dev
	$(PYTEST) -n 3 --dist loadgroup tests/cluster

# mypy takes as long as all the others, so they run beside it.
lint: .venv/dev
	@$(MAKE) --no-print-directory --output-sync=target -j 2 lint-types lint-others

lint-types:
	$(BIN)/mypy

lint-others:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	@$(BIN)/lint-imports > .venv/lint-imports.txt || { cat .venv/lint-imports.txt; exit 1; }
	@$(BIN)/deptry src > .venv/deptry.txt 2>&1 || { cat .venv/deptry.txt; exit 1; }
	$(BIN)/vermin --quiet --no-tips --violations --eval-annotations --target=3.9- src/paceline/agent src/paceline/frameworks src/paceline/runtime src/paceline/storage src/paceline/errors.py src/paceline/jax src/paceline/keras.py src/paceline/plan.py src/paceline/tensorflow src/paceline/torch

bench: .venv/dev
	for script in start cli watch overhead logs generation snapshot_throughput snapshot_memory snapshot_stall scaling serve; do $(BIN)/python bench/$$script.py || exit 1; done
	$(BIN)/python bench/soak.py
	$(BIN)/python bench/restart.py --framework tensorflow
	$(BIN)/python bench/restart.py --framework torch
	$(BIN)/python bench/restart.py --framework jax --compile
	$(BIN)/python bench/restart.py --program translate
	test $$(id -u) != 0 || $(MAKE) bench-cluster

# The same on the cluster of `make cluster`; needs root.
bench-cluster: .venv/dev
	for framework in tensorflow torch; do $(BIN)/python bench/cluster_restart.py --framework $$framework || exit 1; done
	for script in cluster_scale cluster_follow; do $(BIN)/python bench/$$script.py || exit 1; done

# A Kubernetes cluster of three nodes on this machine, for manual tests; needs root.
cluster: .venv/dev
	@PYTHONPATH=tests $(BIN)/python -m support.lab up

cluster-down:
	@PYTHONPATH=tests $(BIN)/python -m support.lab down

lock: $(UV)
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --custom-compile-command "make lock" requirements/uv.in -o requirements/uv.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --custom-compile-command "make lock" pyproject.toml --extra tensorflow --group demo -o requirements/demo.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --custom-compile-command "make lock" pyproject.toml --extra tensorflow --extra torch --extra jax --extra serve --group dev -o requirements/dev.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --custom-compile-command "make lock" requirements/mlflow.in -o requirements/mlflow.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade --no-deps --custom-compile-command "make lock" requirements/torchft.in -o requirements/torchft.txt

# The pictures in README.md and docs/watching.md.
picture: .venv/dev
	$(BIN)/python docs/images/demo.py
	$(BIN)/python docs/images/watch.py
	$(BIN)/python docs/images/page.py

# A wheel and an sdist, in dist/.
dist: .venv/dev
	rm -rf dist
	$(UV) build --quiet --no-build-isolation --python .venv --out-dir dist

clean:
	rm -rf .venv .tools dist
