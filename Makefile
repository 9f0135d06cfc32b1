# make setup      virtual environment .venv with everything, built from this checkout; instant when nothing changed
# make test       unit tests, tests under mpiexec, tests that start MPI jobs of their own
# make test-slow  the long ones among the latter
# make sanitize   the kernels' tests on C++ built with sanitizers; needs GCC's
# make lint       formatters, linters, types
# make demo       the demonstration run; make demo-baseline: the same model by plain data parallel training
# make bench      benchmarks
# make clean      removes what was built, not the environments
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
# PyTorch's own index of builds for CPUs: the general one gives a build for CUDA, 4 GB larger.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
VENV_OPENMPI := .venv-openmpi
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SETUP_STAMP := $(VENV)/.pyddl-setup
OPENMPI_STAMP := $(VENV_OPENMPI)/.pyddl-setup
BUILD_INPUTS := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)

# Every run under mpiexec has an outer limit: a hang must end as a failure.
MPI_SIZES := 1 2 3 4
UNIT_LIMIT_S := 1200
SLOW_LIMIT_S := 3600
MPI_LIMIT_S := 300
JOBS_LIMIT_S := 1200
LIMIT := timeout --kill-after=20

.PHONY: setup setup-openmpi build test test-unit test-mpi test-jobs test-slow sanitize lint demo demo-baseline bench clean

setup: $(SETUP_STAMP)
build: $(SETUP_STAMP)
setup-openmpi: $(OPENMPI_STAMP)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make setup needs Python >= 3.10; got: $$($(PYTHON) --version 2>&1); give another: make setup PYTHON=python3.11" >&2; \
	    exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	    rm -rf $(VENV); \
	    echo "make setup needs Python's venv module with pip; '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; }

# torch first and by the pin, the build tools next, so that the build needs no isolated environment of its own.
$(SETUP_STAMP): constraints.txt $(BUILD_INPUTS) | $(PY)
	$(PIP) install --constraint constraints.txt --no-deps --extra-index-url $(TORCH_INDEX) --retries 1 --timeout 15 torch
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt setuptools pybind11 cmake ninja
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) install --constraint constraints.txt --no-build-isolation \
	    --editable '.[mpich,test,lint]'
	touch $@

# Only Open MPI itself is installed; all else is shared with .venv. mpi4py loads lib/libmpi of the environment that it
# runs in before any other, so nothing needs to be set.
$(OPENMPI_STAMP): constraints.txt $(SETUP_STAMP)
	[ -x $(VENV_OPENMPI)/bin/python ] || $(PY) -m venv --without-pip $(VENV_OPENMPI)
	site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(VENV_OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$site')" > "$$own/shared-with-main-venv.pth"
	$(PIP) --python $(VENV_OPENMPI)/bin/python install --constraint constraints.txt --no-deps openmpi
	touch $@

test: test-unit test-mpi

test-unit: setup
	$(LIMIT) $(UNIT_LIMIT_S) $(PY) -m pytest tests/unit

test-mpi: setup test-jobs
	for size in $(MPI_SIZES); do \
	    echo "== tests/mpi with $$size ranks"; \
	    $(LIMIT) $(MPI_LIMIT_S) $(VENV)/bin/mpiexec -n $$size \
	        $(PY) -m pytest -q -p no:cacheprovider --with-mpi -m mpi tests/mpi || { \
	        echo "tests/mpi with $$size ranks ended with status $$? (124: not done after $(MPI_LIMIT_S) s)" >&2; exit 1; }; \
	done

# These start MPI jobs themselves, under MPICH and Open MPI, and kill ranks in them.
test-jobs: setup setup-openmpi
	$(LIMIT) $(JOBS_LIMIT_S) $(PY) -m pytest -m "not slow" tests/jobs

# The long ones: syncers and learners that stop for ten seconds or more, over shared memory and TCP. About ten minutes.
test-slow: setup setup-openmpi
	$(LIMIT) $(SLOW_LIMIT_S) $(PY) -m pytest -m slow tests/jobs

sanitize: setup
	tests/sanitize.sh $(PY)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard csrc/*.cpp csrc/*.h)

demo: setup
	$(PY) benchmarks/demo.py

demo-baseline: setup
	$(PY) benchmarks/demo.py --baseline

bench: setup
	$(PY) benchmarks/step_overhead.py --json

clean:
	rm -rf build dist *.egg-info pyddl/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pyddl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(SETUP_STAMP)
