# Legato from a fresh checkout: `make serve` and `make test` do all the set-up themselves, each as much as it needs.
#   make setup PYTHON=python3.12        another interpreter (3.11 to 3.13)
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu    torch without CUDA, where pip would take PyPI's
#   make serve CONFIG=ray_configs/... PORT=8080   another cluster, another port
#   make cluster NODES=3                          the same on several Ray nodes of this machine

PYTHON ?= python3
CONFIG ?= ray_configs/quickstart.yaml
# Where pip gets torch from. Empty: as pip is configured.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.legato-installed
DEV_STAMP := $(VENV)/.legato-dev-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Where it is set, as in many a container, each of the hundred interpreters that the tests start compiles Legato anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev serve cluster test test-fast test-long test-clients test-operators test-wheel check bench bench-peers gpu-check clean

# Of two targets that need other extras each would make the environment, and pip would be in it twice at a time.
.NOTPARALLEL:

# What serving needs, with the extra `trace` as in the images; and what checks, tests and benchmarks need, which has all of
# that in it.
setup: $(STAMP)
setup-dev: $(DEV_STAMP)

# torch first and alone: resolved together with the rest, a range would pick the newest release. PyPI's torch for Linux has
# all of CUDA with it, 2 GB and more, also where there is no GPU: TORCH_INDEX names another index for it.
# pip compiles on one core, 21,000 files: twice as long as on two. Of 265 MB Legato and its tests import some 95; of the
# rest, what is large waits until somebody imports it.
UNUSED := /tests?/|/transformers/models/(?!auto/)|/torch/(_inductor|testing)/|/ray/(data|llm|rllib|train|tune)/
UNUSED := $(UNUSED)|/(fontTools|mypyc?|networkx|playwright|setuptools)/
# $(call install,EXTRA): Legato, with an extra of pyproject.toml.
define install
@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Legato needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make setup PYTHON=python3.12")'
test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
$(PIP) install --no-compile torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(PIP) install --no-compile -e '.[$(1)]'
@echo "Compiling what was installed, on all cores"
@$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null 2>&1 || true  # some packages have templates that are no Python
endef
$(STAMP): pyproject.toml Makefile
	$(call install,trace)
	touch $@
$(DEV_STAMP): pyproject.toml Makefile
	$(call install,dev)
	touch $(STAMP) $@

serve: setup
	$(BIN)/python -m cluster serve $(CONFIG) $(if $(PORT),--port $(PORT))

# A Ray cluster of several nodes on this machine, each a `ray start` of its own: prefill on one, decode on another.
NODES ?= 3
cluster: setup
	$(BIN)/python -m cluster.deployment.local_nodes $(CONFIG) --nodes $(NODES) $(if $(PORT),--port $(PORT))

# On each core a process that runs whole files, and in `test` one more: one of them runs all that starts Ray, and mostly
# waits for it (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

test: setup-dev
	$(PYTEST)

# The inner loop: what needs no cluster, weights, processes or interpreter. The other folders of tests/ are named for what they need.
FAST := tests/tree tests/kernels tests/engine tests/kv_transfer tests/prefill_workers tests/decode_workers tests/cluster
test-fast: setup-dev
	$(PYTEST) -q $(FAST)

# All shapes in the interpreter, all models of which `make test` has some, all that is asked of Ray, and properties with
# ROUNDS times other examples, as many as each says (tests/support/thoroughness.py); `make test` tries the same ones in
# every run, and of long ones a part. And the C++ kernels as on lesser processors than this one.
ROUNDS ?= 5
EXAMPLES := hypothesis|import .*(THOROUGH|examples)
test-long: setup-dev
	$(PYTEST) --hypothesis-profile=random tests/interpreted \
	  $$(grep -rlE --include='test_*.py' --exclude-dir=interpreted 'import .*(in_test_long|combined)' tests)
	$(BIN)/python -m pytest --hypothesis-profile=random tests/ray
	for most in avx512 avx2; do \
	  LEGATO_NATIVE=$$most $(PYTEST) tests/kernels tests/processes/test_native_kernels.py \
	    tests/with_models/test_cpu_batch_invariance.py tests/with_models/test_fused_layers.py || exit 1; \
	done
	for round in $$(seq $(ROUNDS)); do \
	  $(PYTEST) --hypothesis-profile=random \
	    $$(grep -rlE --include='test_*.py' --exclude-dir=ray '$(EXAMPLES)' tests) || exit 1; \
	done

# Clients that others wrote, unchanged, against a cluster. They have an environment of their own, which `make test` does
# not need. TESTS="tests/clients/test_litellm.py" runs some.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
INSTRUCTOR := instructor==1.17.0
$(CLIENTS_STAMP): tests/clients/requirements.txt Makefile
	test -x $(CLIENTS)/bin/pip || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --no-input install -r tests/clients/requirements.txt
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --no-input install --no-deps $(INSTRUCTOR)
	touch $@

test-clients: setup-dev $(CLIENTS_STAMP)
	$(BIN)/python -m tests.clients $(CLIENTS)/bin/python $(TESTS)

# What operators look at, by the programs that they look with; `make test` needs neither. On Debian, and without starting what they install as
# services: apt-get install --no-install-recommends prometheus chromium chromium-driver nginx
test-operators: setup-dev
	$(BIN)/python -m pytest -v tests/operators

# Builds the wheel, installs it into a new environment, and serves from an empty folder. Port 8000 must be free.
test-wheel: setup-dev
	$(BIN)/python -m tests.ray.installed_wheel

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2 || { [ $$? = 2 ] && $(BIN)/mypy; } # 2: its workers did not answer, as on a busy machine

bench: setup-dev
	$(BIN)/python -m benchmarks

# Legato beside llama.cpp, OpenVINO, vLLM and transformers, which the first run installs under ~/.cache/legato/peers
# (benchmarks/peers/README.md). PIECES="bf16 guidellm" measures some again and keeps the others' results;
# PEERS="llama.cpp legato" WORK="one_stream" ROUNDS=1 leaves out more.
bench-peers: ROUNDS =
bench-peers: setup-dev
	$(BIN)/python -m benchmarks.peers --pieces "$(PIECES)" --peers "$(PEERS)" --work "$(WORK)" $(if $(ROUNDS),--rounds $(ROUNDS))

# On a machine with an NVIDIA GPU: all that waits for one (docs/gpu.md). With that machine's own Python, which has a torch
# for its driver: nothing is installed. STEPS="kernels speed" runs some of it; where a command may not last long, PART=1 runs
# what fits into MINUTES, and PART=2 the next.
GPU_PYTHON ?= python3
MINUTES ?= 9
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu.check $(STEPS) --minutes $(MINUTES) $(if $(PART),--part $(PART))

# Keeps the virtual environment and the converted models (~/.cache/legato).
clean:
	rm -rf build legato.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
