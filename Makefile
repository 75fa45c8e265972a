# Two commands set everything up: `make demo` and `make test`. Needs Python 3.10 to 3.13 and make, nothing else.
# Another interpreter: make PYTHON=python3.12 demo. On Windows: CONTRIBUTING.md has the same steps without make.

PYTHON = python3
VENV = .venv
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready
DOCS_READY = $(VENV)/.docs-ready
CODE = src tests scripts benchmarks

# Modules are compiled once, not by every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test readers windows test-oldest test-newest architecture format lint types documents notebooks docs wheel release-check release-suites clean

demo: $(READY)
	$(RUN) scripts/demo.py

test: $(READY)
	$(RUN) -m pytest -n auto

# Tests with programs that open files of winml: all programs, or READERS="genai qnn".
READERS =
readers: $(READY)
	$(RUN) scripts/readers.py $(READERS)

# Python, torch and ONNX Runtime for Windows, under Wine.
windows: $(READY)
	$(RUN) scripts/readers.py windows

architecture: $(READY)
	$(RUN) -m pytest tests/architecture

format: $(READY)
	$(RUN) -m ruff check --fix-only $(CODE)
	$(RUN) -m ruff format $(CODE)

lint: $(READY)
	$(RUN) -m ruff check $(CODE)
	$(RUN) -m ruff format --check $(CODE)

types: $(READY)
	$(RUN) -m mypy

documents: $(READY)
	$(RUN) scripts/architecture_picture.py --write
	$(RUN) scripts/build_config_reference.py
	$(RUN) scripts/build_manifest_schema.py
	$(RUN) scripts/package_picture.py
	$(RUN) scripts/verb_reference.py
	$(RUN) scripts/benchmark_page.py
	$(RUN) scripts/provider_formats.py

notebooks: $(READY)
	$(RUN) scripts/notebook_outputs.py

# The site is build/site; search needs a server: python -m http.server -d build/site
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --clean --quiet
	$(RUN) scripts/docs_site.py build/site

wheel: $(READY)
	$(RUN) -m build --wheel

# Wheel and sdist, installed and run in fresh environments of each installed Python, or of the named versions:
# make PYTHONS="python3.12 path/to/python3.13" release-check
PYTHONS =
release-check: $(READY)
	$(RUN) scripts/release_check.py $(foreach python,$(PYTHONS),--python $(python))

# The suite with the oldest and the newest versions of each Python in PYTHONS: some ten minutes each on an idle machine.
release-suites:
	for python in $(or $(PYTHONS),$(PYTHON)); do $(MAKE) PYTHON=$$python test-oldest test-newest || exit 1; done

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

EXTRAS = demo,diffusion,eval,gguf,sentences,test,dev

# Modules are compiled when they are imported: most never are, and pip would compile them one after the other.
INSTALL = $(RUN) -m pip install --disable-pip-version-check --no-compile -c constraints.txt

# The stamp is written last, so an interrupted install is taken up again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[$(EXTRAS)]"
	touch $(READY)

$(DOCS_READY): $(READY)
	$(INSTALL) -e ".[docs]"
	touch $(DOCS_READY)

# All tests without tests of the repository: documents show output of the versions of constraints.txt.
OF_OTHER_VERSIONS = tests/unit tests/property tests/integration tests/e2e

# The oldest versions that pyproject.toml allows, in a separate environment; some have no wheel for Python 3.13.
# uv can select them.
test-oldest:
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -q uv
	.venv-oldest/bin/uv pip install --python .venv-oldest/bin/python --resolution lowest-direct -e ".[demo,eval,gguf,test]"
	.venv-oldest/bin/python -m pytest -n auto $(OF_OTHER_VERSIONS)

# The newest versions there are, whatever constraints.txt says.
test-newest:
	$(PYTHON) scripts/check_python.py
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --disable-pip-version-check -e ".[demo,eval,gguf,test]"
	.venv-newest/bin/python -m pytest -n auto $(OF_OTHER_VERSIONS)
