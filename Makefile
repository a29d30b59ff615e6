# Everything is set up inside this folder: `make demo`, `make test`. Nothing is rebuilt without need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q -c constraints.txt
# UNITY=OFF compiles each kernel on its own: twice as long in all, but shorter after an edit.
UNITY ?= ON
EDITABLE := $(INSTALL) --no-build-isolation -C cmake.define.CMAKE_UNITY_BUILD=$(UNITY) -e
KERNELS := $(wildcard src/pipeplan/_core/*.cpp src/pipeplan/_core/*.hpp)

# An editable installation knows the modules that were there when it was made. Their list is a file
# that is touched only where it changes, so that a new module installs anew and an edit does not.
$(shell mkdir -p $(VENV); find src/pipeplan -name '*.py' | sort > $(VENV)/modules.new; \
  cmp -s $(VENV)/modules.new $(VENV)/modules || cp $(VENV)/modules.new $(VENV)/modules)

define MISSING_TOOLS
from scikit_build_core.build import get_requires_for_build_editable
print(*(name.partition(">")[0] for name in get_requires_for_build_editable()))
endef
export MISSING_TOOLS

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

# The build tools live in the virtual environment, so that rebuilding a kernel needs no download. cmake and
# ninja are added only where the system has none, or one that is too old.
$(VENV)/tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pipeplan needs Python >= 3.11; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-compile scikit-build-core nanobind
	missing=$$($(BIN)/python -c "$$MISSING_TOOLS") && if test -n "$$missing"; then $(INSTALL) --no-compile $$missing; fi
	touch $@

# Python compiles modules when they are first imported; most never are.
$(VENV)/installed: $(VENV)/tools $(VENV)/modules pyproject.toml CMakeLists.txt $(KERNELS)
	$(EDITABLE) . --no-compile
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(EDITABLE) ".[test]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(EDITABLE) ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
