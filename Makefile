# make demo: a 2-node training on this machine.  make quick: before each commit.  make test: everything the tests need, then all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KUBE_BIN ?= $(HOME)/.cache/drumbeat-cluster/bin

.PHONY: demo quick test again test-others test-train test-short busy check packages pyz bench layouts corpus fuzz everywhere faults faults-train stops slurm-versions proofs versions workloads kube-server cluster clean

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Byte code is made of what is imported, when it is: of all that these packages bring it would take two minutes.
$(VENV)/.cpu: pyproject.toml $(VENV)/.pip
	$(PIP) -e '.[cpu]'
	@touch $@

# `make -j demo check`: one pip at a time.
$(VENV)/.dev: pyproject.toml $(VENV)/.pip $(if $(filter demo bench corpus dist tutorial,$(MAKECMDGOALS)),$(VENV)/.cpu)
	$(PIP) -e '.[cpu,dev]'
	@touch $(VENV)/.cpu $@

# The pip that comes with Python 3.11 takes twice as long as the newest one. Where there is no newer one, it will do.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	-$(PIP) --upgrade pip
	@touch $@

unexport PYTHONDONTWRITEBYTECODE

demo: $(VENV)/.cpu
	@PATH="$(CURDIR)/$(BIN):$$PATH" drumbeat run examples/demo.yaml

# A test that fails beside all the others is repeated once, alone, and named as unsteady if it passes then.
test:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.dev packages
	@rm -rf $(OUTCOMES) && mkdir $(OUTCOMES)
	@$(MAKE) --no-print-directory --jobs=4 --keep-going check test-others test-train test-short \
		|| $(AGAIN)

OUTCOMES := $(VENV)/outcomes
AGAIN = $(MAKE) --no-print-directory again
test-others test-train test-short: export DRUMBEAT_OUTCOME = $(abspath $(OUTCOMES))/$@.json

again: check
	@$(BIN)/python tests/again.py $(OUTCOMES)

# Each in a process of its own, beside the others: tests that import torch themselves, which makes a process large, and many short
# tests, which every worker would have to collect.
IN_TRAIN := tests/train tests/integrations tests/verify/test_script.py
SHORT := $(addprefix tests/,agent cli containers contracts convert docs doctor jobfile lint logs machine metrics plan predict runfolder sites)

# Of the other folders, the tests that only compute or start little.
COMPUTED := $(addprefix tests/,backends/test_comeback_script.py backends/test_slurm_unreachable.py backends/test_states.py backends/test_table.py bundle/test_private_copies.py causes comeback/test_nodes.py kubernetes/test_manifests.py kubernetes/test_states.py report/test_intervals.py report/test_printed_logs.py report/test_report.py report/test_scaling.py slurm/test_golden.py slurm/test_hostile_words.py slurm/test_words.py ssh/test_words.py tune/test_bad_input.py tune/test_observe.py tune/test_parts.py tune/test_search.py tune/test_submit.py verify/test_judge.py verify/test_mpi.py verify/test_script.py verify/test_show.py watch/test_curve.py watch/test_model.py watch/test_one_state.py watch/test_plain.py watch/test_status.py watch/test_web.py)

# Before each commit: style, types, layers, and every test that only computes.
quick: check
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --max-worker-restart=0 -m "not slow" $(SHORT) $(COMPUTED)

# A worker that dies ends the tests at once, with the name of its test: xdist (3.8) can wait for ever for the work of a dead one.
test-others:
	$(BIN)/python -m pytest -n 6 --dist loadgroup --no-loadscope-reorder --max-worker-restart=0 \
		$(addprefix --ignore=,$(IN_TRAIN) $(SHORT))

# Both cores are in use.
test-train: export OMP_NUM_THREADS := 1

# Their output is shown at the end: it would mix with that of the others.
test-train test-short:
	@$(BIN)/python -m pytest $(if $(filter test-train,$@),$(IN_TRAIN),$(SHORT)) > $(VENV)/$@.out 2>&1 || { cat $(VENV)/$@.out; exit 1; }
	@echo "$@:"; grep -E '^SKIPPED| passed' $(VENV)/$@.out

packages:
	@sh tests/system-packages.sh

# The whole suite twice in a row beside a load of 8: a test that needs luck shows here, as no test is repeated.
busy: $(VENV)/.dev
	sh tests/beside-load.sh 8 2 $(MAKE) test AGAIN=false

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH=$(BIN):$$PATH $(BIN)/lint-imports
	@$(BIN)/python tools/rooms.py

pyz: drumbeat.pyz

# Needs PyYAML alone: a small environment of its own, unless the large one is there.
SMALL := $(if $(wildcard $(VENV)/.cpu),$(VENV)/.cpu,.venv-pyz/.done)

drumbeat.pyz: $(SMALL) $(shell find src -name '*.py' -o -name '*.yaml' -o -name '*.sh')
	$(dir $(SMALL))bin/python -m drumbeat.bundle.build $@

.venv-pyz/.done: pyproject.toml
	$(PYTHON) -m venv .venv-pyz
	.venv-pyz/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.PHONY: docs docs-search dashboard dist tutorial

# The documentation as a site, in site/; every link and anchor is checked.
docs: .venv-docs/.done
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict
	@echo "open site/index.html"

# Does the site's search find the right page first? Needs node.
docs-search: .venv-docs/.done $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/docs/test_search.py

.venv-docs/.done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# Grafana's board against its own types, from npm; the alert rules and /metrics with a real Prometheus.
dashboard: $(VENV)/.dev packages
	npm install --prefix build/grafana --silent --ignore-scripts --no-audit --no-fund @grafana/schema typescript
	$(BIN)/python -m pytest -q -rs tests/watch/test_prometheus.py

# dist/: sdist, wheel and drumbeat.pyz, checked, and each tried in an environment of its own.
dist: $(VENV)/.cpu
	$(PYTHON) tools/dist.py

# The commands of the laptop tutorial, as typed.
tutorial: $(VENV)/.cpu
	$(BIN)/python tests/docs/tutorial.py

bench: $(VENV)/.cpu
	$(BIN)/python bench/start.py

# Every family of models on every layout against one process; writes measured/layouts.md. Half an hour of two cores.
layouts: $(VENV)/.dev
	$(BIN)/python bench/layouts.py

# How well diagnose reads real logs; ends well where there are none (DRUMBEAT_CORPUS).
corpus: $(VENV)/.cpu
	$(BIN)/python tools/corpus.py

# 10,000 damaged logs, and that time grows no faster than length.
fuzz: $(VENV)/.dev
	DRUMBEAT_FUZZ_CASES=10000 $(BIN)/python -m pytest -q --timeout 1800 tests/logs/test_fuzz.py

# 30 kills at random moments of training and saving; the last weights must be those of an undisturbed run.
faults-train: $(VENV)/.dev
	DRUMBEAT_KILLS=30 DRUMBEAT_KILL_SEED=$$$$ $(BIN)/python -m pytest -q -s --timeout 1800 tests/train/test_kills.py

# Every row of the fault table, for real; writes measured/reliability.md. A call that was cut short goes on where it was (build/);
# FAULTS="word ..." chooses rows by name, which are run again.
faults: $(VENV)/.dev
	@failed=0; \
	$(BIN)/python -m tests.faults.table $(FAULTS) || failed=1; \
	$(BIN)/python -m tests.comeback.measure || failed=1; \
	DRUMBEAT_KNOCKS=100000 $(BIN)/python -m pytest -q -s --timeout 1800 tests/faults/test_flood.py || failed=1; \
	exit $$failed

# 100 stops of Slurm jobs at random moments: cancelled, requeued, preempted, held, at their time limit. A call that was cut short
# goes on where it was (build/); STOPS="--count 20 --seed 7" chooses others, STOPS="--first 40 --count 20" a part.
stops: $(VENV)/.dev
	@sh tests/system-packages.sh
	$(BIN)/python -m tests.slurm.stops $(STOPS)

# What tests on Slurm show, on the Slurm and the Python of other Debian releases: 20.11 and 3.9, 22.05 and 3.11, 24.11 and 3.13, and those of sid.
# Each release is unpacked once, outside this tree. Needs root on Debian; SLURM_RELEASES="trixie" chooses.
SLURM_RELEASES ?= bullseye bookworm trixie sid
SLURM_SYSTEMS ?= $(HOME)/.cache/drumbeat-slurm
slurm-versions: $(VENV)/.dev
	@sh tests/system-packages.sh
	@mkdir -p $(SLURM_SYSTEMS); failed=""; for release in $(SLURM_RELEASES); do \
		tests/versions/slurm-system.sh $$release $(SLURM_SYSTEMS)/$$release || exit 1; \
		echo "$$release: $$(chroot $(SLURM_SYSTEMS)/$$release slurmd -V), $$(chroot $(SLURM_SYSTEMS)/$$release python3 -V)"; \
		DRUMBEAT_SLURM_SYSTEM=$(SLURM_SYSTEMS)/$$release $(BIN)/python -m pytest -q --timeout 1800 -k "not training and not full_disk" \
			$(addprefix tests/slurm/test_,submit.py stopped.py comes_back.py refused.py range.py) || failed="$$failed $$release"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Longer proofs: more cases of what a quicker test of `make test` shows already (layouts, precisions, trials, lost pods, long work),
# healthy jobs in 49 surroundings, and who is blamed under load.
proofs: $(VENV)/.dev
	@sh tests/system-packages.sh
	DRUMBEAT_PROOFS=1 $(BIN)/python -m pytest -q -m proof --timeout 1800 tests
	DRUMBEAT_PROOFS=1 $(BIN)/python -m pytest -q --timeout 1800 tests/bundle/test_oldest_python.py
	$(BIN)/python bench/worlds.py
	$(BIN)/python bench/blame.py --trials 50 --load 40

# One job file on this machine, Slurm, Kubernetes, ssh hosts and mpirun: the same loss. Needs root; some minutes of two idle
# cores. Kubernetes is left out, with the reason, where `make cluster` has not built it and KUBE_BIN=FOLDER names no programs.
everywhere: $(VENV)/.dev
	@sh tests/system-packages.sh
	KUBE_BIN=$(KUBE_BIN) DRUMBEAT_EVERYWHERE=1 $(BIN)/python -m pytest -q -rs --timeout 1500 tests/everywhere \
		tests/ssh/test_containers.py tests/ssh/test_lost_host.py

# The launchers' option tables and the formats of their lines against the newest releases, in an environment of its own. It sees
# the packages of .venv, and its torch is the one there: no other is downloaded.
versions: $(VENV)/.dev
	$(PYTHON) -m venv .venv-newest
	$(BIN)/python tests/versions/environment.py .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-newest/constraints \
		--upgrade transformers accelerate deepspeed lightning jax
	.venv-newest/bin/python -m pytest -q tests/plan/test_launchers.py tests/runs/test_wrapped_launchers.py \
		tests/integrations tests/versions/deepspeed_run.py tests/versions/jax_run.py tests/versions/presets.py

# Real programs from DRUMBEAT_WORKLOADS (a folder of checkouts and environments: tests/workloads/programs.yaml), by hand and under drumbeat, whole
# and with one rank that fails, then ten command lines as people have them: measured/workloads.md. What was interrupted goes on where it was.
# WORKLOADS="word ..." chooses programs and command lines, and writes no page.
workloads: $(VENV)/.dev
	$(BIN)/python -m tests.workloads.table $(WORKLOADS)

# What a real Kubernetes server decides by itself (rights, quotas, queues, places), without kubelets: no pod runs. Needs root on Debian;
# the server is built once, outside this tree. KUBE_BIN=FOLDER takes programs that are there already.
kube-server: $(VENV)/.dev
	@test -x $(KUBE_BIN)/kube-apiserver || tests/cluster/build.sh $(HOME)/.cache/drumbeat-cluster
	KUBELETS=0 KUBE_BIN=$(KUBE_BIN) $(BIN)/python -m pytest -q -rs --durations 0 --timeout 3600 tests/cluster/server_alone.py

# Kubernetes jobs on a real cluster on this machine, kubelets included.
cluster: $(VENV)/.dev
	@test -x $(KUBE_BIN)/kubelet || tests/cluster/build.sh $(HOME)/.cache/drumbeat-cluster \
		kube-apiserver kube-controller-manager kube-scheduler kubelet
	KUBE_BIN=$(KUBE_BIN) $(BIN)/python -m pytest -q -rs --durations 0 --timeout 3600 tests/cluster/on_a_cluster.py \
		tests/cluster/troubles_on_a_cluster.py tests/cluster/server_alone.py tests/cluster/kinds_on_a_cluster.py

clean:
	rm -rf $(VENV) .venv-newest .venv-docs .venv-pyz drumbeat.pyz build dist site src/*.egg-info
