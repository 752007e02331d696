# Two commands do everything on a fresh machine (Python 3.11, make, a C compiler): `make demo` and `make test`.
# PIP_EXTRA_INDEX_URL is honoured, e.g. for an index of CPU builds of torch.
PYTHON ?= python3.11
PYTHON := $(shell command -v $(PYTHON) || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
TESTS  ?= tests
UI     ?= 1
SHELL  := /bin/bash

ACCEPT := accept-demo accept-overload accept-canaries accept-faults accept-infrastructure accept-conformance \
	accept-soak accept-mutations accept-replay accept-million accept-fuzz accept-remote accept-pages accept-peers \
	accept-lab accept-lab-real accept-watch accept-compare accept-why accept-grafana accept-capacity accept-capacity-real

.PHONY: help demo test lint lock clean bench bench-engine bench-accounting bench-virtual bench-virtual-speed \
	bench-anchor bench-loadgen kernels-table grafana-json lint-stack accept accept-compose $(ACCEPT)
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Each stamp is made once; a changed lock or project file makes it again.
$(VENV)/.run: requirements.lock requirements-torch.lock pyproject.toml
	@echo "== setting up $(VENV): torch (200 MB on a CPU index, several GB of CUDA builds from the default one) and about 120 packages (350 MB); 2 to 6 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(f"tailspan needs Python 3.11 or newer, this is {sys.version.split()[0]}; remedy: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock 2> >(grep -v "is ignored: it is neither" >&2)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.lock 2> >(grep -v "is ignored: it is neither" >&2)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . 2> >(grep -v "is ignored: it is neither" >&2)
	@touch $@

demo: $(VENV)/.run ## a real model, a minute of a real trace, the verdict, the page (UI=0 ends without the page)
	@UI=$(UI) $(BIN)/tailspan demo

test: $(VENV)/.run ## all tests, 10 to 20 minutes on 2 cores
	@test -x /usr/bin/chromium || echo "skipping the tests in a browser: apt-get install chromium brings it"
	@command -v prometheus >/dev/null || echo "skipping the tests on a real Prometheus: apt-get install prometheus brings it"
	@echo "== testing $(TESTS); about 15 minutes on 2 cores, the model (93 MB) is downloaded once"
	@$(BIN)/python $(if $(filter tests,$(TESTS)),scripts/test_all.py,-m pytest $(TESTS))

lint: $(VENV)/.run ## ruff and mypy --strict
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy tailspan.py

bench: $(VENV)/.run ## the CPU forward beside its floor and beside plain torch, about 2 minutes
	@echo "== about 2 minutes; quiet the machine first"
	@$(BIN)/python -m benchmarks.forward

PEERS ?= torch,transformers,vllm
bench-engine: $(VENV)/.run ## the engine through HTTP beside its PEERS (torch,transformers,vllm,llama.cpp), 20 to 50 minutes
	@echo "== quiet the machine first; peers are installed into build/peers once (vllm: 1.5 GB, llama.cpp: compiled)"
	@$(BIN)/python -m benchmarks.engine_peers --peers $(PEERS) --out build/engine-speed.md

bench-accounting: $(VENV)/.run ## what phases, step log and laws cost in tokens/s, about 6 minutes
	@$(BIN)/python -m benchmarks.accounting --pairs 80

bench-virtual: $(VENV)/.run ## simulated Llama-3.1-8B on one H100 under ten minutes of the Azure trace, about 5 minutes
	@$(BIN)/python -m benchmarks.virtual_azure

bench-virtual-speed: $(VENV)/.run ## how many times faster than real virtual time is, by load, about 3 minutes
	@$(BIN)/python -m benchmarks.virtual_speed

bench-anchor: $(VENV)/.run ## does the simulated twin predict a real run that it never saw? about 5 minutes
	@echo "== quiet the machine first"
	@$(BIN)/python -m benchmarks.anchor

kernels-table: $(VENV)/.run ## compile every kernel for three architectures, write docs/kernels.json; minutes
	@$(BIN)/python -m engine.kernel_table --write docs/kernels.json

PEER_CLIENTS ?= bare,locust,aiperf,guidellm,inference-perf
bench-loadgen: $(VENV)/.run ## the load generator on one core beside its floor and its PEER_CLIENTS, about 10 minutes
	@echo "== quiet the machine first; peers are installed into build/peers once (8 GB, minutes more; inference-perf needs a Python 3.12)"
	@$(BIN)/python -m benchmarks.loadgen --peers $(PEER_CLIENTS) --out build/loadgen-speed.md

accept: $(ACCEPT) ## the long checks, one target each, hours in all; results are kept in docs/accept.md

DEMOS ?= 20
accept-demo: $(VENV)/.run ## DEMOS (20) demos in a row: each must be VALID and check out; about 90 s each
	@$(BIN)/python -m benchmarks.accept_demo --runs $(DEMOS)

accept-overload: $(VENV)/.run ## half of what the engine carries, then 3 times that rate: the queue must take it, step times must not; 3 minutes
	@$(BIN)/python -m benchmarks.accept_overload

accept-canaries: $(VENV)/.run ## the engine's faults against recorded canaries: each must be called by its name; 20 minutes
	@$(BIN)/python -m benchmarks.accept_canaries

accept-faults: $(VENV)/.run ## each fault under load on the real engine, then on the simulated one with 5 seeds; 20 to 60 minutes
	@$(BIN)/python -m benchmarks.accept_faults
	@$(BIN)/python -m benchmarks.accept_faults --simulated

accept-infrastructure: $(VENV)/.run ## overload, KV cut, queue limit, cut streams, a hang and the retry storm on a simulated engine; 6 minutes
	@echo "== quiet the machine first"
	@$(BIN)/python -m benchmarks.accept_infrastructure

CONFORMANCE ?= 400
accept-conformance: $(VENV)/.run ## schemathesis against the server, CONFORMANCE (400) requests an operation; about 10 minutes
	@$(BIN)/python -m benchmarks.conformance --examples $(CONFORMANCE)

SOAK ?= 30
accept-soak: $(VENV)/.run ## SOAK (30) minutes at 1.5x capacity with clients that go, then idle: laws exact, memory level
	@$(BIN)/python -m benchmarks.soak --minutes $(SOAK)

accept-mutations: $(VENV)/.run ## deliberate faults in the kernels, each of which a test must see; minutes
	@$(BIN)/python -m tests.kernels.mutations

MINUTES ?= 10
accept-replay: $(VENV)/.run ## MINUTES (10) of Azure code and of Mooncake at real speed: the stub's log agrees within 2 ms
	@$(BIN)/python -m benchmarks.arrival_replay --minutes $(MINUTES)

REQUESTS ?= 1000000
accept-million: $(VENV)/.run ## REQUESTS (a million) through one worker: memory is flat; about 7 minutes
	@$(BIN)/python -m benchmarks.million --requests $(REQUESTS)

SSE_MINUTES ?= 10
TRACE_MINUTES ?= 2
accept-fuzz: $(VENV)/.run ## broken input: SSE_MINUTES (10) of streams, TRACE_MINUTES (2) for each trace format
	@$(BIN)/python -m benchmarks.fuzz --sse-minutes $(SSE_MINUTES) --trace-minutes $(TRACE_MINUTES)

accept-remote: $(VENV)/.run ## a worker behind a line that delays, loses and breaks off: every row arrives; through ssh too; needs root; 3 minutes
	@$(BIN)/python -m benchmarks.accept_remote
	@command -v sshd >/dev/null || test -x /usr/sbin/sshd || { echo "skipping the tunnel: apt-get install openssh-server brings sshd"; exit 0; }; \
		$(BIN)/python -m benchmarks.accept_remote --tunnel

accept-pages: $(VENV)/.run ## the pages on a run of REQUESTS (1000000): first figure under 2 s, every filter under 1 s; 3 minutes
	@echo "== quiet the machine first"
	@$(BIN)/python -m benchmarks.accept_pages --requests $(REQUESTS)

TARGETS ?= vllm,llama.cpp
accept-peers: $(VENV)/.run ## real TARGETS (vllm,llama.cpp) under the load generator, phases by request; installs and compiles, 30 minutes
	@$(BIN)/python -m benchmarks.accept_peers --peers $(TARGETS)

SEEDS ?= 5
FIRST_SEED ?= 101
accept-lab: $(VENV)/.run ## every scenario of the lab in virtual time, SEEDS (5) of each at two loads: the confusion matrix; goes on where it was stopped
	@$(BIN)/tailspan lab run --all --seed $(FIRST_SEED) --seeds $(SEEDS) --resume --runs build/lab --markdown build/lab.md

accept-lab-real: $(VENV)/.run ## the scenarios that a real engine can have, SEEDS (5) of each; most of a day, so name a smaller SEEDS
	@echo "== quiet the machine first"
	@$(BIN)/tailspan lab run --all --way real --seed $(FIRST_SEED) --seeds $(SEEDS) --resume --runs build/lab-real \
		--markdown build/lab-real.md

WATCH_MINUTES ?= 60
accept-watch: $(VENV)/.run ## tailspan watch for WATCH_MINUTES (60), a fault in the middle: seen in 2 minutes, called by name, memory level
	@$(BIN)/python -m benchmarks.accept_watch --minutes $(WATCH_MINUTES)

PAIRS ?= 2000
accept-compare: $(VENV)/.run ## PAIRS (2000) unchanged pairs at three loads in virtual time: false alarms, power, K; hours
	@$(BIN)/python -m benchmarks.accept_compare --pairs $(PAIRS) --out build/accept-compare.md

accept-why: $(VENV)/.run ## compare and explain on REQUESTS (1000000) a side: under 10 s, under 60 s, under 4 GB
	@echo "== quiet the machine first"
	@$(BIN)/python -m benchmarks.accept_why --requests $(REQUESTS)

grafana-json: $(VENV)/.run ## write the Grafana dashboards and the Prometheus rules anew from their code
	@$(BIN)/python -m dashboards.grafana.make
	@$(BIN)/python -m dashboards.rules

accept-grafana: $(VENV)/.run ## every panel, rule and alert on a real Prometheus (apt-get install prometheus); 10 minutes
	@$(BIN)/python -m benchmarks.accept_grafana

accept-compose: $(VENV)/.run ## the compose stack: starts, is seen, heals, goes (Docker and chromium needed); 10 minutes
	@$(BIN)/python -m benchmarks.accept_compose --build

lint-stack: $(VENV)/.run ## hadolint on the Dockerfile, the compose schema, Grafana's own types (npm needed); a minute
	@$(BIN)/python -m benchmarks.lint_stack

accept-capacity: $(VENV)/.run ## five searches for the capacity of a simulated H100: within 5 % of each other; minutes
	@$(BIN)/python -m benchmarks.accept_capacity virtual

accept-capacity-real: $(VENV)/.run ## two searches on the real engine: within 15 % on goodput; about 25 minutes
	@echo "== quiet the machine first"
	@$(BIN)/python -m benchmarks.accept_capacity real

lock: ## resolve the dependencies anew (several minutes)
	@$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet pip-tools
	@build/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url \
		--no-emit-find-links --no-emit-trusted-host --extra dev --output-file build/all.lock pyproject.toml
	@$(PYTHON) scripts/split_lock.py build/all.lock

clean: ## remove what was made here (not the models in the cache, not the runs)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
