# One file to set up, try, test and measure kvfork. `make` alone tells what there is.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2
TRAINING ?= build/tiny-vision
RELEASED := proto/released/kvfork.v1.binpb
# Test files run side by side in so many processes, one thread each; a file's tests stay together.
WORKERS ?= 2
STORIES := reasoning_stripped tree_search tool_pause shared_system_prompt crash_and_resume best_of_n \
	langgraph_time_travel agents_sdk
PROTOS := types inference_service snapshot_service server_service

# The embedded Gemma model has terms of its own; using these targets on it accepts them (kvfork models get gemma3 shows them).
export KVFORK_ACCEPT_GEMMA_TERMS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo examples serve chat test test-slow soak fuzz fuzz-rpc families check lint release-contract type gen gen-check gen-clients gen-clients-check conformance \
        train-vision eval-vision bench clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z_%-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  MODEL=gemma3 picks the sliding-window model for demo and serve; ARGS=... is passed on."

setup: $(VENV)/.done ## Make the environment (.venv); the other targets do it when needed

$(VENV)/.done: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar on --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar on -e '.[server,gateway,inspector,dev]'
	$(BIN)/python -m pip install --quiet --progress-bar on --no-deps --group lean
	@touch $@

$(VENV)/.bench: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --progress-bar on -e '.[bench]'
	@touch $@

demo: setup ## Generate, fork and roll back on a real model, with receipts (MODEL=gemma3, MODEL=tiny-vision)
	$(BIN)/kvfork demo --model $(MODEL) $(ARGS)

examples: setup ## Play what orchestrators do with it, each example held to its own figures (a few minutes)
	@for story in $(STORIES); do echo; echo "== $$story"; $(BIN)/python clients/python/examples/$$story.py $(ARGS) || exit 1; done

serve: setup ## Serve a model on 127.0.0.1:50051 (MODEL=..., ARGS="--max-batch 4")
	$(BIN)/kvfork serve --model $(MODEL) $(ARGS)

chat: setup ## Talk to a running server
	$(BIN)/kvfork chat $(ARGS)

test: setup ## Run the test suite (about 20 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not full" $(ARGS)

test-slow: $(VENV)/.bench ## Run the longer tests too: soak, memory, every client
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

soak: setup ## Mixed traffic on tiny models for MINUTES=30, with every invariant checked when idle; prints JSON
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(ARGS)

fuzz: setup ## Damage at random what the store reads from disk (MINUTES=10)
	$(BIN)/python tests/kvcache/fuzz.py --minutes $(or $(MINUTES),10) $(ARGS)

fuzz-rpc: setup ## Random messages, valid and not, against every RPC of a running server (MINUTES=10)
	$(BIN)/python -m tests.e2e.fuzz_rpc --minutes $(or $(MINUTES),10) $(ARGS)

families: setup ## Hold every model family of mlx-lm to the conformance suite; writes docs/layers.md (half an hour)
	$(BIN)/python -m tests.families --all --markdown docs/layers.md $(ARGS)

lint: setup ## Formatting, lint, the contract's lint, and that it breaks no released client
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against $(RELEASED)

release-contract: setup ## Make the contract as it is now the one that later changes must not break
	$(BIN)/buf build proto --exclude-source-info -o $(RELEASED)

type: setup ## mypy, strict outside the engine
	$(BIN)/mypy

gen: setup ## Regenerate the stubs from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto \
		$(PROTOS:%=kvfork/v1/%.proto)

gen-check: gen ## Fail if the committed stubs differ from what proto/ gives
	git diff --exit-code -- proto

train-vision: setup ## Train tiny-vision anew, or go on with it (single core)
	$(BIN)/python -m service.models.vision.train --work $(TRAINING) $(ARGS)

eval-vision: setup ## Ask tiny-vision a thousand questions about held-out pictures
	$(BIN)/python -m service.models.vision.evaluate $(ARGS)

gen-clients: setup ## Regenerate what the other languages' clients have of proto/ (ARGS=go for one of them)
	$(BIN)/python clients/generate.py $(ARGS)

gen-clients-check: setup ## Fail if the clients differ from what proto/ gives
	$(BIN)/python clients/generate.py --check $(ARGS)

conformance: setup ## Every client plays the same scenarios against a server; writes docs/clients.md
	$(BIN)/python -m tests.conformance $(if $(ARGS),$(ARGS),--markdown docs/clients.md)

check: lint type gen-check gen-clients-check test test-slow ## Everything that CI runs

bench: $(VENV)/.bench ## Run every benchmark and draw the plots under docs/ (minutes)
	$(BIN)/python -m tests.bench all $(ARGS)

bench-%: $(VENV)/.bench ## Run one benchmark: bench-rollback, bench-chat, ...
	$(BIN)/python -m tests.bench $* $(ARGS)

clean: ## Remove the environment and what tools left; models stay in the cache directory
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
