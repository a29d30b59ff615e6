# Everything is set up inside this folder: `make demo`, `make test`. Nothing is rebuilt without need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard src/pipeplan/_core/*.cpp src/pipeplan/_core/*.hpp)

# An editable installation knows the modules that were there when it was made. Their list is a file
# that is touched only where it changes, so that a new module installs anew and an edit does not.
$(shell mkdir -p $(VENV); find src/pipeplan -name '*.py' | sort > $(VENV)/modules.new; \
  cmp -s $(VENV)/modules.new $(VENV)/modules || cp $(VENV)/modules.new $(VENV)/modules)

.PHONY: demo test test-full lint docs clean

demo: $(VENV)/installed
	$(BIN)/pipeplan demo

test: $(VENV)/installed-test lint
	$(BIN)/pytest -n 2 -m "not full"

test-full: $(VENV)/installed-test lint
	$(BIN)/pytest -n 2

# The documentation as a site in build/site; a warning is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The build tools live in the virtual environment, so that rebuilding a kernel needs no download.
$(VENV)/tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pipeplan needs Python >= 3.11; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/installed: $(VENV)/tools $(VENV)/modules pyproject.toml CMakeLists.txt $(KERNELS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e .
	$(BIN)/python -m compileall -q src/pipeplan
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
