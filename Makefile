# A thin face over plain Python commands. README.md gives those too, for macOS and Windows without make.

VENV ?= .venv
PYTHON ?= python3 python3.13 python3.12 python3.11
PROMPT ?= What is a transformer in machine learning? Answer in two sentences.
WORKERS ?= 2
TESTS ?= tests notebooks
# The package index with the CPU build of torch, as PyTorch's installation page gives it. Empty: pip's own choice.
TORCH_INDEX ?=

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY := $(BIN)/python
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	-c constraints.txt
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with=notebooks/sanitize.cfg --nbval-cell-timeout=120
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lab bench doctor setup constraints clean
export PROMPT

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 18
	@echo 'every command: $(BIN)/minillm --help'
	@echo 'variables: PROMPT="..."  PYTHON=python3.12  VENV=.venv  TORCH_INDEX=URL  WORKERS=2  TESTS=tests/test_cli.py  LAB=--no-browser'

demo: $(VENV)/.installed-demo ## a real model answers: make demo PROMPT="..."
	@$(PY) -m minillm generate --stats --max-tokens 128 -- "$$PROMPT"

test: $(VENV)/.installed-dev ## everything that CI runs: unit tests and every notebook
	$(PY) -m minillm pull
	@# In the order of collection: the file that takes longest, notebooks in a browser, begins early and not last.
	$(PY) -m pytest $(NBVAL) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

lab: $(VENV)/.installed-notebooks ## JupyterLab, at your own copy of notebook 00
	$(PY) -m minillm pull
	$(PY) -m minillm course work 00
	$(PY) -m jupyter lab $(LAB) notebooks/mine/00_one_token_end_to_end.ipynb

bench: $(VENV)/.installed-bench ## this machine: decoding and prefill beside transformers (some minutes)
	$(PY) -m minillm bench

doctor: $(VENV)/.installed-demo ## check this installation, and say what to do about each problem
	@$(PY) -m minillm doctor

setup: $(VENV)/.installed-dev ## the environment alone, with everything in it

define install
@echo "installing $(1) into $(VENV) (about 1 GB with torch, several with its CUDA build): a minute or two"
@$(INSTALL) -e '$(1)'
endef

# A stamp a level; dev holds all of them. An install that was cut short leaves no stamp and is done again.
$(VENV)/.installed-demo: $(REQUIREMENTS)
	@$(make-venv)
	$(call install,.)
	@touch $@

$(VENV)/.installed-notebooks: $(REQUIREMENTS)
	@$(make-venv)
	$(call install,.[notebooks])
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-bench: $(REQUIREMENTS)
	@$(make-venv)
	$(call install,.[bench])
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-dev: $(REQUIREMENTS)
	@$(make-venv)
	$(call install,.[dev])
	@touch $(VENV)/.installed-demo $(VENV)/.installed-notebooks $(VENV)/.installed-bench $@

define make-venv
if ! $(PY) -m pip --version >/dev/null 2>&1; then \
  for python in $(PYTHON); do \
    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then found=$$python; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "minillm needs Python 3.11, 3.12 or 3.13; found none of them as: $(PYTHON)."; \
    echo "Install one (python.org, your package manager, or conda), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python"; \
    exit 1; \
  fi; \
  if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "This Python cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; \
  fi; \
  echo "making $(VENV) with $$($$found --version)"; \
  $$found -m venv $(VENV); \
fi
endef

constraints: ## pin anew all that .[dev] needs, at versions that exist today (TORCH=2.13.0)
	$(eval FRESH := $(shell mktemp -d))
	@$(subst $(VENV),$(FRESH),$(make-venv))
	$(FRESH)/bin/python -m pip install -e '.[dev]' $(if $(TORCH),torch==$(TORCH))
	{ echo "# Every version that the tests ran with; made by \`make constraints\`. Each install goes through this file."; \
	  echo "# What a CUDA build of torch brings along is pinned by torch itself."; \
	  $(FRESH)/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed -E 's/\+[a-z0-9.]+$$//' \
	  | grep -vE '^(nvidia|cuda|triton|minillm)' ; } > constraints.txt
	rm -rf $(FRESH)

clean: ## remove the environment (the model's cache stays)
	rm -rf $(VENV) build *.egg-info
