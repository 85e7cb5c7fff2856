# Everything a newcomer needs: on a fresh clone `make train` and `make test` install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
KERNELS := $(shell find src -name '*.cpp' -o -name '*.h')
SOURCES := $(KERNELS) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: help install train docs test thorough mutants survivors check quick slow lint resolve bench fuzz sanitize lock dist sbom vulnerabilities clean

help:
	@echo "make train     install into $(VENV) and train privately on simulated clients (4 to 7 minutes where nothing else runs)"
	@echo "make docs      the documentation as a site, in build/site; needs no network once installed"
	@echo "make test      install into $(VENV) and run the tests, all but the thorough ones"
	@echo "make thorough  the same checks over more cases"
	@echo "make mutants   seed faults in the source, one at a time: the tests must find each (hours)"
	@echo "make survivors generated faults that no quick test finds, of a sample (SHARE=0.01 of all: two minutes)"
	@echo "make check     lint, and the tests that are not slow"
	@echo "make slow      measure which tests are slow, and write tests/slow.txt"
	@echo "make lint      ruff, mypy and clang-format"
	@echo "make resolve   that the constraints resolve on plain PyPI for Python $(PYTHONS)"
	@echo "make bench     speed of every stage beside memcpy and NumPy"
	@echo "make fuzz      a million hostile inputs to the parsers (INPUTS=20000 for a short run)"
	@echo "make sanitize  the kernels' tests under AddressSanitizer and UBSan"
	@echo "make dist      sdist and wheels, built twice and tried in empty environments; make sbom says what is in them"
	@echo "make lock      the hashes of everything that CI and releases install, from constraints.txt"
	@echo "make vulnerabilities  known ones of what is locked, where the index knows"

install: $(VENV)/installed

# An editable install: Python changes are live, a change to the kernels rebuilds them.
# With LOCKED=1, as in CI, every package but PyTorch's must have the bytes that packaging/locked.txt was made from.
$(VENV)/installed: $(SOURCES)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(PIP) --require-hashes --no-deps --requirement packaging/locked.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable '.[dev]'
else
	$(PIP) --editable '.[dev]'
endif
	touch $@

train: install
	$(BIN)/cpsgd train

# Strict: a broken link or a missing reference is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

# A missing extra is an error here; `pytest` by itself skips what needs it. One worker more than there are processors:
# tests of real processes mostly wait. Quick tests do not, and each worker imports everything once more. Each begins with
# a share of neighbouring tests, which have plans and fixtures in common, and then takes from the others.
PROCESSORS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
WORKERS := $(shell expr $(PROCESSORS) + 1)
# Bytecode is kept, since tests start many processes.
PYTEST = env -u PYTHONDONTWRITEBYTECODE CPSGD_REQUIRE_EXTRAS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: install
	$(PYTEST) -m "not thorough"

thorough: install
	$(PYTEST) -m thorough

# First the faults that were thought of, then every generated one with all tests, which takes hours.
mutants: install
	PYTHONPATH=tests $(BIN)/python -m mutants.runner $(ONLY)
	$(GENERATED) --marks "not thorough" --table tests/mutants/README.md

# A sample of about 14,000 generated ones, by quick tests: two minutes of two cores. It fails where more than MOST of
# them survive. 4.2 % of twice this sample did (tests/mutants/README.md has them). Lower MOST as survivors are found: the
# sample changes where the code does.
SHARE ?= 0.01
SEED ?= 2026
MOST ?= 0.1
GENERATED := OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutants.generated
survivors: install
	$(GENERATED) --share $(SHARE) --seed $(SEED) --minutes 3 --seconds 5 --most $(MOST)

# Side by side: mypy takes most of a minute on a fresh clone, and less than a second where little has changed.
check: install
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint quick

quick: WORKERS := $(PROCESSORS)
quick: install
	$(PYTEST) -m "not slow and not thorough"

slow: install
	$(PYTEST) -m "not thorough" -p tests.timing

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(KERNELS)

# What pip finds by default, whatever wheels this machine has lying around. Only metadata is downloaded.
PYTHONS := 3.11 3.12 3.13
RESOLVE := env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL $(if $(PIP_CERT),SSL_CERT_FILE="$(PIP_CERT)") \
	$(VENV)-resolve/bin/uv pip compile --quiet --no-config --no-annotate --no-header --only-binary :all: --no-binary pyspark
resolve: $(VENV)-resolve/bin/uv
	set -e; for version in $(PYTHONS); do \
		$(RESOLVE) --python-version $$version --extra dev --constraint constraints.txt pyproject.toml \
			> $(VENV)-resolve/$$version.txt; \
		echo "Python $$version: $$(wc -l < $(VENV)-resolve/$$version.txt) packages"; \
	done

# PyTorch, Triton and what CUDA brings come in several builds of one version: their versions are fixed, their bytes not.
UNLOCKED := torch triton $(foreach part,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn cufft cufile curand cusolver \
	cusparse cusparselt nccl nvjitlink nvshmem nvtx,nvidia-$(part) nvidia-$(part)-cu13) cuda-bindings cuda-pathfinder cuda-toolkit
LOCK := env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL $(if $(PIP_CERT),SSL_CERT_FILE="$(PIP_CERT)") \
	$(VENV)-resolve/bin/uv pip compile --quiet --no-config --no-annotate --no-header --generate-hashes
lock: $(VENV)-resolve/bin/uv
	$(LOCK) --universal --python-version 3.11 --extra dev --constraint constraints.txt \
		$(addprefix --no-emit-package ,$(UNLOCKED)) pyproject.toml packaging/build.in --output-file packaging/locked.txt
	$(LOCK) --universal --python-version 3.11 packaging/build.in --output-file packaging/build.txt
	echo cibuildwheel | $(LOCK) --universal --python-version 3.12 - --output-file packaging/cibuildwheel.txt

dist: install
	PATH="$$PATH" $(PYTHON) packaging/dist.py

# In CycloneDX's format, of what the package itself asks for.
sbom: $(VENV)-supply/bin/cyclonedx-py
	mkdir -p dist
	$(VENV)-supply/bin/cyclonedx-py requirements packaging/locked.txt --pyproject pyproject.toml \
		--output-reproducible --output-file dist/sbom.json
	@echo "written: dist/sbom.json"

vulnerabilities: $(VENV)-supply/bin/pip-audit
	$(VENV)-supply/bin/pip-audit --disable-pip --require-hashes --requirement packaging/locked.txt

$(VENV)-supply/bin/cyclonedx-py $(VENV)-supply/bin/pip-audit:
	$(PYTHON) -m venv $(VENV)-supply
	$(VENV)-supply/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom pip-audit

$(VENV)-resolve/bin/uv:
	$(PYTHON) -m venv $(VENV)-resolve
	$(VENV)-resolve/bin/python -m pip install --quiet --disable-pip-version-check uv

bench: install
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/growth.py
	FLWR_TELEMETRY_ENABLED=0 $(BIN)/python -m benchmarks.peers
	$(BIN)/python benchmarks/datasets.py
	$(BIN)/python benchmarks/private_statistics.py --rounds 50
	$(BIN)/python benchmarks/training.py
	FLWR_TELEMETRY_ENABLED=0 $(BIN)/python benchmarks/secagg.py
	$(BIN)/python benchmarks/secagg_scale.py
	$(BIN)/python -m benchmarks.pair
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/timing.py --measurements 20000

# Guided by coverage where atheris has a wheel for this Python, otherwise by chance.
INPUTS ?= 1000000
fuzz: install
	-$(PIP) atheris
	PYTHONPATH=tests $(BIN)/python -m fuzz.driver --inputs $(INPUTS)

# A second environment whose kernels are instrumented; Python itself is not, so the runtime is preloaded.
sanitize: $(VENV)-sanitize/installed
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	$(VENV)-sanitize/bin/python -m pytest -q -p no:cacheprovider -m "not slow and not thorough" tests/codec tests/test_aggregator.py

$(VENV)-sanitize/installed: $(SOURCES) $(shell find src -name '*.py')
	test -d $(VENV)-sanitize || $(PYTHON) -m venv $(VENV)-sanitize
	$(VENV)-sanitize/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--config-settings=cmake.define.CPSGD_SANITIZE=ON --config-settings=build-dir=build/sanitize \
		--config-settings=install.strip=false . pytest hypothesis mpmath
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-resolve $(VENV)-sanitize $(VENV)-supply build dist
