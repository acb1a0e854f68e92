# "make demo" and "make test" need nothing but a new Debian 12: they set up what is missing.
SHELL := /bin/bash
export PATH := /usr/bin:$(PATH)  # Debian's cmake and ctest, which setup installs, whatever else there is.
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
ARGS ?=
export TIDY # Folders for clang-tidy, as src|tools; empty: all.
peers = build/peers-venv
build = cmake --preset $(1) && cmake --build --preset $(1) --parallel $(JOBS)

.PHONY: help demo test python lint format asan tsan neon gpu coverage fuzz peers setup setup-dev setup-neon setup-gpu clean

help: ## Lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

demo: setup ## Sets up, builds, runs the main job on the shipped capture: a table, and demo/report.html
	$(call build,release)
	scripts/demo.sh

test: setup-dev ## Sets up, builds, runs all tests
	$(call build,dev)
	find build/dev -name '*.gcda' -delete # Counters of an older build would add up.
	ctest --preset dev --parallel $(JOBS)

coverage: test ## Tests, then line coverage of src (fails below 90 %); build/coverage/index.html
	scripts/coverage.sh

python: setup ## Installs the Python package into a new environment, build/python-venv; runs the README's example there
	scripts/python.sh

lint: setup-dev ## Formatters and linters, warnings as errors
	scripts/lint.sh

format: setup-dev ## Formats all sources
	scripts/lint.sh fix

asan: setup-dev ## Tests under the address, leak and undefined-behaviour sanitizers
	$(call build,asan)
	ctest --preset asan --parallel $(JOBS)

tsan: setup-dev ## Tests under the thread sanitizer
	$(call build,tsan)
	ctest --preset tsan --parallel $(JOBS)

neon: setup-neon ## Builds for AArch64, tests its NEON engine under an emulator
	$(call build,neon)
	ctest --preset neon --parallel $(JOBS)

gpu: setup-gpu ## Builds the CUDA engine, reads its machine code; its tests where there is a device
	$(call build,gpu)
	python3 scripts/check_sass.py build/gpu/tools/mxflash/mxflash
	ctest --preset gpu --parallel $(JOBS)

fuzz: setup-dev ## Each fuzzer for FUZZ_SECONDS (30) from its corpus
	$(call build,tidy)
	scripts/fuzz.sh $(FUZZ_SECONDS)

peers: setup ## Times the CPU engine against torch and onnxruntime (installs them): ARGS are options of bench/peers.py
	$(call build,release)
	$(peers)/bin/python -c '' 2>/dev/null || python3 -m venv --clear $(peers)
	cmp --silent bench/requirements.txt $(peers)/requirements.txt || \
	  { $(peers)/bin/python -m pip install --quiet --requirement bench/requirements.txt && \
	  cp bench/requirements.txt $(peers)/requirements.txt; }
	$(peers)/bin/python -B bench/peers.py $(ARGS)

setup: ## Installs what building needs
	scripts/setup.sh

setup-dev: ## Installs what the tests and linters need as well
	scripts/setup.sh dev

setup-neon: ## Installs what building for AArch64 and its tests need
	scripts/setup.sh neon

setup-gpu: ## Installs what building the CUDA engine and its tests need
	scripts/setup.sh gpu

clean: ## Removes what building and the demo made; keeps .venv and .sysroot-arm64
	rm -rf build demo
