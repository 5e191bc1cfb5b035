# make demo | make test | make docs | make bench | make soak | make reproduce | make install: each does its own set-up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: install test test-all demo docs bench soak reproduce clean

install: .venv/installed

# Every file is checked against requirements.lock but torch, whose CPU builds come from different places: it is pinned, as
# an unpinned torch would pull the CUDA build.
.venv/installed: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# With the slow ones, which take some minutes more.
test-all: test
	$(BIN)/pytest -m slow

# The default recipe, whose mixture of eight Gaussians is right on its own here, and the same with one Gaussian, which
# points between the goals where both are likely: there the energy decides. The report shows both with it and without.
demo: install
	rm -rf runs/demo runs/demo-one-gaussian runs/demo-demonstrations.npz
	$(BIN)/cebm demos particle --episodes 2222 --out runs/demo-demonstrations.npz
	$(BIN)/cebm train --data runs/demo-demonstrations.npz --episodes 2000 --steps 2500 --out runs/demo
	$(BIN)/cebm train --data runs/demo-demonstrations.npz --episodes 2000 --steps 1500 \
		--energy.base.components 1 --acting.candidates 64 --out runs/demo-one-gaussian
	$(BIN)/cebm eval runs/demo --episodes 200 --without-energy
	$(BIN)/cebm eval runs/demo-one-gaussian --episodes 200 --without-energy
	$(BIN)/cebm report runs/demo runs/demo-one-gaussian --out runs/demo/report.html

# The site, in build/docs/html: open index.html there. Needs npm once, for MathJax. A warning is an error. The examples
# are run, which takes some minutes; make docs ARGS=--quick leaves them out, for a look at a page while writing it.
docs: .venv/documented
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m docs.site build/docs/source $(ARGS)
	$(BIN)/python -m sphinx -b html -c docs/site -W -n --keep-going -q -E -d build/docs/doctrees build/docs/source build/docs/html

.venv/documented: .venv/installed docs/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

bench: install
	$(BIN)/python -m benchmarks.measure
	$(BIN)/python -m benchmarks.from_nothing
	$(BIN)/python -m benchmarks.document

# Hostile traffic against a server of our own, on loopback: ten minutes. make soak ARGS="--frames 3000" tries it.
soak: install
	$(BIN)/python -m benchmarks.soak $(ARGS)

# make reproduce ARGS="--scale smoke" tries the code; without ARGS it is the paper's scale, which takes hours.
reproduce: install
	$(BIN)/python -m reproduction $(ARGS)

clean:
	rm -rf .venv build runs .mypy_cache .pytest_cache .ruff_cache
