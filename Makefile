# `make demo` and `make test` do all of their own set-up. They need Python 3.10 or newer, and root to save kernels.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

LABEXTENSION := jupyter_gpuckpt/labextension/package.json

.PHONY: help demo test test-gpu lint bench bench-gpu bench-store setup clean labextension

help:
	@echo 'make demo          run the example notebook: build state, save it, break it, restore it'
	@echo 'make test          check the code, and run every test that this machine can run'
	@echo 'make test-quick    for daily work: tests of no browser, no server, nothing slow'
	@echo 'make test-oldest   a part of it: what users do most, with the oldest versions of ipykernel and the rest'
	@echo 'make test-gpu      on a GPU machine: the tests marked gpu, file by file (GPU_TESTS="test_pools test_managed=120")'
	@echo 'make lint          only check the code'
	@echo 'make bench         measure saves and restores beside criu by hand'
	@echo 'make bench-gpu     the same of GPU kernels, beside criu and the driver by hand'
	@echo 'make bench-store   measure the store beside cp, tar, and (where they are installed) restic and borg'
	@echo 'make soak          save and restore for two hours, and see that nothing grows (SOAK="--cycles 300 --minutes 0")'
	@echo 'make test-peers    run other projects'\'' test suites over our kernels and jobs (PEERS="nbclient zdtm")'
	@echo 'make test-programs save and restore programs that are heavy to install: Spark, Ray, torchrun, MPI, databases'
	@echo 'make test-hub      stop, cull and start the servers of several users by a real JupyterHub'
	@echo 'make test-shared-store  use a store that machines share by NFS, on a file server and two clients'
	@echo 'make test-slurm    run jobs on a real Slurm of two nodes, which are namespaces of this machine'
	@echo 'make test-pods     build the container image, and stop, kill and start its pods by podman'
	@echo 'make test-kubernetes  drain and stop what deploy/kubernetes has, on a real Kubernetes of two nodes, which it builds'
	@echo 'make test-chart    render the Helm chart, and compare it with deploy/kubernetes and with Kubernetes'\'' schemas'
	@echo 'make first-minutes walk what a newcomer does, in a browser, from an empty machine, and count it'
	@echo 'make docs          build the documentation site into build/docs'
	@echo 'make labextension  build the JupyterLab extension for .venv'
	@echo 'make screenshots   make the pictures in the README anew'
	@echo 'make setup         only what these need: packages in .venv, and CRIU for you alone'
	@echo 'make clean         remove .venv and what the tools left here'

demo: setup
	@$(BIN)/python examples/demo.py

# Where this is set, as in many containers, each of the thousands of processes of the tests would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

test:
	@$(MAKE) --no-print-directory --jobs=2 setup labextension $(BIN)/chromium .venv/oldest/ready
	@test -e /dev/nvidiactl && echo 'The tests marked gpu run by themselves: make test-gpu' || \
		echo 'No NVIDIA GPU here: the tests marked gpu will not run.'
	@$(BIN)/python -m compileall -q jupyter_gpuckpt tests benchmarks
	@echo 'The tests run in parts, four at once; what each says comes when it ends (25 to 60 minutes on two processors) ...'
	@$(MAKE) --no-print-directory --jobs=4 --output-sync=target --keep-going lint test-podman test-oldest $(PARTS)

# Four at once, since a part waits much: for a kernel, for criu, for a page. The longest begins first, the shortest last.
PARTS := test-keeper-c test-lab test-broker test-server test-store test-keeper-s test-keeper-d test-jobs test-kernel-p \
	test-keeper-l test-keeper-t test-cli test-others test-kernel-a
keepers = $(wildcard tests/keeper/test_[$1]*.py)
test-lab: THESE = tests/lab
test-broker: THESE = tests/broker
test-cli: THESE = tests/cli
test-jobs: THESE = tests/jobs
test-keeper-c: THESE = $(call keepers,a-c)
test-keeper-d: THESE = $(call keepers,d-k)
test-keeper-l: THESE = $(call keepers,l-r)
test-keeper-s: THESE = $(call keepers,s)
test-keeper-t: THESE = $(call keepers,t-z)
test-kernel-a: THESE = $(wildcard tests/kernel/test_[a-o]*.py)
test-kernel-p: THESE = $(wildcard tests/kernel/test_[p-z]*.py)
test-server: THESE = tests/server
test-store: THESE = tests/store
# Those with a target of their own, and tests/gpu, which says why it does not run where there is no GPU.
APART := hub kubernetes pods programs shared_store slurm $(if $(wildcard /dev/nvidiactl),gpu)
IN_PARTS := broker cli jobs keeper kernel lab server store
test-others: THESE = $(patsubst %,--ignore=tests/%,$(APART) $(IN_PARTS))

.PHONY: $(PARTS) test-podman
$(PARTS):
	@echo '$@:'
	@$(BIN)/python -m pytest $(THESE)

test-podman:
	@echo '$@:'
	@$(MAKE) --no-print-directory .venv/pods/ready || echo 'The tests of pods do not run here: there is no podman.'
	@test ! -e .venv/pods/ready || $(BIN)/python -m pytest tests/pods/test_pods.py

# An environment that is not new has older versions of what the package needs. They have a deprecated word here and there.
OLDEST := tests/keeper/test_save_and_restore.py tests/keeper/test_one_at_a_time.py tests/kernel/test_hooks.py \
	tests/kernel/test_debugger.py tests/kernel/test_like_a_plain_kernel.py tests/kernel/test_magic_words.py \
	tests/server/test_access.py
.PHONY: test-oldest
test-oldest: .venv/oldest/ready
	@echo '$@:'
	@.venv/oldest/bin/python -m pytest -W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning $(OLDEST)

.venv/oldest/ready: $(READY) tests/oldest_versions.py
	@$(BIN)/python -m venv --clear --upgrade-deps .venv/oldest
	@$(BIN)/python tests/oldest_versions.py >.venv/oldest/constraints.txt
	@SKIP_JUPYTER_BUILDER=1 .venv/oldest/bin/python -m pip install -qq --disable-pip-version-check --no-compile \
		--constraint .venv/oldest/constraints.txt --editable '.[server]' numpy pytest pytest-timeout requests websocket-client
	@touch $@

# Not beside anything else: several programs at a GPU at once make its driver 20 to 40 times slower.
test-gpu: setup
	@$(BIN)/python tests/gpu/file_by_file.py $(GPU_OPTIONS) $(GPU_TESTS)

# For daily work: no browser, no servers, nothing slow; of real kernels what a person does with them, one after another.
QUICK := tests/keeper/test_imports.py tests/keeper/test_one_at_a_time.py tests/keeper/test_save_and_restore.py \
	tests/kernel/test_devices.py tests/kernel/test_magic_words.py tests/jobs/test_words.py \
	tests/cli/test_progress.py tests/cli/test_spelling.py
QUICK_STORE := $(filter-out $(patsubst %,tests/store/test_%.py,broken_off_transfers export faults fuzz hostile_servers \
	known_remotes remotes sealing sftp together),$(wildcard tests/store/test_*.py))

.PHONY: test-quick test-quick-kernels test-quick-store
test-quick: setup
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-quick-kernels test-quick-store

test-quick-kernels:
	@$(BIN)/python -m pytest -q -m 'not slow and not gpu' $(QUICK)

test-quick-store:
	@$(BIN)/python -m pytest -q -m 'not slow and not gpu' tests/freeze tests/machine/test_c*.py $(QUICK_STORE)

lint: $(READY) labextension/node_modules/.package-lock.json
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@MYPYPATH=tests $(BIN)/python -m mypy --package peers
	@$(NPM) run lint
	@$(NPM) test

bench: setup
	@$(BIN)/python -m benchmarks.kernel

# On a GPU machine; torch must be there (`.venv/bin/pip install torch`). Programs whose packages are not are left out.
bench-gpu: setup
	@$(BIN)/python -m benchmarks.gpu_limits
	@$(BIN)/python -m benchmarks.kernel --cpu --gpu 0 1 8 24 --rounds 3 --json bench-gpu.json
	@$(BIN)/python -m benchmarks.kernel --cpu --gpu 40 --rounds 1 --json bench-gpu.json
	@$(BIN)/python -m benchmarks.overhead
	@$(BIN)/python -m benchmarks.changes --gpu 200 1200
	@$(BIN)/python -m benchmarks.pauses
	@$(BIN)/python -m benchmarks.programs --steps --json bench-steps.json
	@$(BIN)/python -m benchmarks.programs --rounds 3 --json bench-programs.json

bench-store: setup
	@$(BIN)/python -m benchmarks.store
	@$(BIN)/python -m benchmarks.growth

# By hand, and before a release: it downloads what it runs, and takes hours.
.PHONY: test-peers
test-peers: setup
	@PYTHONPATH=tests $(BIN)/python -m peers $(if $(ZDTM),--zdtm $(ZDTM)) $(PEERS)

# By hand, and before a release: what it installs, by pip and apt, takes some gigabytes.
TORCH ?= torch
.PHONY: test-programs
test-programs: setup .venv/programs-ready
	@$(BIN)/python -m pytest tests/programs $(PROGRAMS)

.venv/programs-ready: $(READY) tests/programs/requirements.txt
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'The programs come from Debian or Ubuntu, by apt-get as root.'; exit 1; }
	@echo 'Installing Java, Redis, MariaDB, etcd, Mosquitto, PostgreSQL, Open MPI, and packages into .venv (some minutes, once) ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		default-jre-headless etcd-client etcd-server mariadb-server mosquitto openmpi-bin postgresql redis-server >/dev/null
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r tests/programs/requirements.txt '$(TORCH)'
	@touch $@

# JupyterHub comes by pip, and its proxy by npm, into .venv. The Littlest JupyterHub is in no index: its test runs where
# LITTLEST_JUPYTERHUB names a folder with its source, or an address of it.
.PHONY: test-hub
test-hub: setup .venv/hub-ready .venv/slurm-ready
	@test -z '$(LITTLEST_JUPYTERHUB)' || \
		$(BIN)/python -m pip install -qq --disable-pip-version-check '$(LITTLEST_JUPYTERHUB)'
	@$(BIN)/python -m pytest tests/hub $(HUB)

.venv/hub-ready: $(READY) tests/hub/requirements.txt
	@echo 'Installing JupyterHub and its proxy into .venv (half a minute, once) ...'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r tests/hub/requirements.txt
	@mkdir -p .venv/hub
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix .venv/hub --silent install --no-audit --no-fund configurable-http-proxy
	@touch $@

# Slurm comes from Debian or Ubuntu, and is run in namespaces, not as services of this machine.
.PHONY: test-slurm
test-slurm: setup .venv/slurm-ready
	@$(BIN)/python -m pytest tests/slurm $(SLURM)

.venv/slurm-ready: $(READY)
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'Slurm comes from Debian or Ubuntu, by apt-get as root.'; exit 1; }
	@echo 'Installing Slurm (half a minute, once) ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		iproute2 munge slurm-client slurmctld slurmd util-linux >/dev/null
	@touch $@

# The machines are User Mode Linux, with an NFS server's programs from Debian; nothing of it is installed.
.PHONY: test-shared-store
test-shared-store: setup .venv/shared-store/ready
	@$(BIN)/python -m pytest tests/shared_store $(SHARED_STORE)

SHARED_STORE_FROM := user-mode-linux nfs-kernel-server nfs-common rpcbind libtirpc3 libtirpc-common libwrap0 \
	libnfsidmap1 libevent-core-2.1-7 libkeyutils1 keyutils kmod libkmod2
.venv/shared-store/ready: $(READY)
	@for program in apt-get dpkg-deb mkfs.ext4 ip; do command -v $$program >/dev/null || \
		{ echo "The file server comes from Debian, by apt-get. There is no $$program here."; exit 1; }; done
	@echo 'Fetching User Mode Linux and an NFS server into .venv (a minute, once) ...'
	@rm -rf .venv/shared-store && mkdir -p .venv/shared-store/debs
	@apt-get update -qq
	@cd .venv/shared-store/debs && apt-get download -qq $(SHARED_STORE_FROM) 2>/dev/null
	@for deb in .venv/shared-store/debs/*.deb; do dpkg-deb --extract $$deb .venv/shared-store; done
	@mkdir -p .venv/shared-store/lib/modules
	@mv .venv/shared-store/usr/lib/uml/modules/* .venv/shared-store/lib/modules
	@rm -rf .venv/shared-store/debs
	@touch $@

.PHONY: test-pods
test-pods: setup .venv/pods/ready .venv/hub-ready
	@$(BIN)/python -m pytest tests/pods $(PODS)

# Podman comes from Debian or Ubuntu, and is not installed: the tests lay it over /usr and /etc in mounts of their own.
# So does a file system without sockets.
.venv/pods/ready: $(READY)
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'Podman comes from Debian or Ubuntu, by apt-get as root.'; exit 1; }
	@echo 'Fetching podman, crun, debootstrap and exFAT into .venv (some seconds, once) ...'
	@rm -rf .venv/pods && mkdir -p .venv/pods/debs/partial .venv/pods/root/usr .venv/pods/root/etc/containers
	@apt-get update -qq
	@apt-get install -qq -y --download-only --no-install-recommends -o Dir::Cache::archives='$(CURDIR)/.venv/pods/debs' \
		crun debootstrap exfat-fuse exfatprogs podman >/dev/null
	@for deb in .venv/pods/debs/*.deb; do test ! -e "$$deb" || dpkg-deb --extract "$$deb" .venv/pods/debs/all; done
	@cd .venv/pods/debs/all 2>/dev/null || exit 0; cp -a usr ../../root; test ! -d etc/containers || cp -a etc/containers ../../root/etc; \
		for folder in bin sbin lib; do test ! -d $$folder || cp -a $$folder/. ../../root/usr/$$folder; done
	@rm -rf .venv/pods/debs
	@touch $@

# Rendered by helm where it is, and else by Go with the libraries that helm has, from Debian 12.
.PHONY: test-chart
test-chart: $(READY) .venv/chart-ready
	@$(BIN)/python -m pytest tests/deploy

.venv/chart-ready: $(READY)
	@command -v helm >/dev/null || $(MAKE) --no-print-directory install-go
	@touch $@

.PHONY: install-go
install-go:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'The chart is rendered by helm, or by Go from Debian 12. Install helm, or as root: make test-chart'; exit 1; }
	@echo 'Installing Go and what the chart is rendered by (a minute, once) ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends golang-go \
		golang-github-masterminds-sprig-dev golang-github-xeipuuv-gojsonschema-dev golang-k8s-sigs-yaml-dev >/dev/null

# Kubernetes is built from Debian's source package (seven minutes of one processor, once), and is run in namespaces.
.PHONY: test-kubernetes
test-kubernetes: setup .venv/podman-installed .venv/hub-ready .venv/chart-ready .venv/kubernetes/ready
	@$(BIN)/python -m pytest tests/kubernetes $(KUBERNETES)

.venv/podman-installed: $(READY)
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'Podman comes from Debian or Ubuntu, by apt-get as root.'; exit 1; }
	@echo 'Installing podman, crun and debootstrap (a minute, once) ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		crun debootstrap podman util-linux >/dev/null
	@touch $@

# Not built anew with what .venv has beside it.
.venv/kubernetes/ready: tests/kubernetes/fetch_and_build.sh | $(READY)
	@for program in apt-get dpkg-source ip make openssl; do command -v $$program >/dev/null || \
		{ echo "Kubernetes is built from Debian's packages. There is no $$program here."; exit 1; }; done
	@echo 'Building Kubernetes into .venv (ten minutes, once) ...'
	@rm -rf .venv/kubernetes && mkdir -p .venv/kubernetes
	@tests/kubernetes/fetch_and_build.sh .venv/kubernetes
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r tests/kubernetes/requirements.txt
	@touch $@

.PHONY: first-minutes
first-minutes: setup labextension $(BIN)/chromium
	@$(BIN)/python -m benchmarks.first_minutes

.PHONY: soak
soak: setup
	@PYTHONPATH=tests $(BIN)/python tests/soak.py $(SOAK)

# Asked for every time, since CRIU lies outside of this folder; where it is there already, that takes a moment.
setup: $(READY)
	@$(BIN)/jupyter gpuckpt setup

# Bytecode is made by all processors, where pip uses one. Some packages have templates that are no Python, which are left.
$(READY): pyproject.toml hatch_libraries.py $(shell find jupyter_gpuckpt -name '*.[ch]')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or newer is needed, and "$(PYTHON)" is not. Name another: make PYTHON=python3.12'; exit 1; }
	@echo 'Installing packages into .venv (a minute or two, once) ...'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory new-venv
	@rm -rf .venv/share/jupyter/labextensions/jupyter_gpuckpt  # a link, when `make labextension` made it
	@mkdir -p jupyter_gpuckpt/labextension
	@SKIP_JUPYTER_BUILDER=1 $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/(moto|tests?)/' .venv/lib || true
	@touch $@

# Node comes with the packages in .venv.
NPM := PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix labextension --silent

labextension/node_modules/.package-lock.json: $(READY) labextension/package.json labextension/package-lock.json
	@echo 'Installing what the JupyterLab extension is built with (a minute, once) ...'
	@$(NPM) ci --no-audit --no-fund
	@touch $@

$(LABEXTENSION): labextension/node_modules/.package-lock.json $(shell find labextension/src labextension/style labextension/schema -type f)
	@$(NPM) run build >build.log 2>&1 || { cat build.log; rm -f build.log $@; exit 1; }
	@rm -f build.log

# JupyterLab finds it by a link, so that what is built anew counts at once.
labextension: $(LABEXTENSION)
	@mkdir -p .venv/share/jupyter/labextensions
	@rm -rf .venv/share/jupyter/labextensions/jupyter_gpuckpt
	@ln -s "$(CURDIR)/jupyter_gpuckpt/labextension" .venv/share/jupyter/labextensions/jupyter_gpuckpt

# The tests click in a real browser: the machine's own, or Debian's.
$(BIN)/chromium: $(READY)
	@command -v chromium >/dev/null || $(MAKE) --no-print-directory install-chromium
	@ln -sf "$$(command -v chromium || echo /usr/bin/chromium)" $@

.PHONY: screenshots
screenshots: setup labextension $(BIN)/chromium
	@GPUCKPT_SCREENSHOTS=docs $(BIN)/python -m pytest -q tests/lab/test_looks.py tests/lab/test_panel.py -k 'light or all_that'
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=tests:tests/lab $(BIN)/python tests/lab/film.py docs/first-restore.png docs/undo.png

# A link that leads nowhere is an error; so is every other warning.
.PHONY: docs
docs: .venv/docs-ready
	@$(BIN)/python -m sphinx -W --keep-going --fresh-env -q -b html docs build/docs
	@echo 'Open build/docs/index.html, or: $(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1'

.venv/docs-ready: $(READY)
	@echo 'Installing what the documentation is built with ...'
	@SKIP_JUPYTER_BUILDER=1 $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@touch $@

.PHONY: install-chromium
install-chromium:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'The tests need chromium. As root: apt-get install chromium'; exit 1; }
	@echo 'The tests need chromium; installing it ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null

# With the newest pip: what comes with Python 3.11 takes two minutes longer to find out which packages fit together.
# Debian keeps a part of Python's venv in a package of its own.
.PHONY: new-venv python3-venv
new-venv:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python3-venv
	@$(PYTHON) -m venv --clear --upgrade-deps .venv

python3-venv:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'Python lacks its module ensurepip. As root: apt-get install python3-venv'; exit 1; }
	@echo 'Python needs python3-venv to make .venv; installing it ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null

clean:
	rm -rf labextension/node_modules labextension/lib jupyter_gpuckpt/labextension
	rm -rf .venv .peers .pods .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
