# make        set up, probe the shipped checkpoint, say where the results are
# make test   set up, run the test suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: all probe test lint report zoo clean
.DEFAULT_GOAL := all

all: probe

probe: $(READY)
	@$(BIN)/python analyses/probe_stats.py

test: $(READY)
	@$(BIN)/python -m pytest -n auto

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

# The report on the shipped checkpoints (reports/zoo/report.html).
report: $(READY)
	@$(BIN)/python analyses/make_report.py --checkpoint zoo --output reports/zoo

# Trains the shipped checkpoints anew (minutes on two cores).
zoo: $(READY)
	@$(BIN)/python analyses/train_zoo.py

# Installed once; again only when what is to be installed has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); this needs Python 3.11 or newer." \
		     "Install one and call: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,cluster]'
	@touch $@

clean:
	rm -rf $(VENV)
