# SPDX-License-Identifier: MIT OR Apache-2.0

PREFIX ?= /usr/local
REPORT ?= report
CARGO ?= cargo
SECONDS ?= 60
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
PROGRAM := $(TARGET_DIR)/release/manylane
LIBRARY := $(TARGET_DIR)/release/libmanylane_preload.so
C_FILES := $(wildcard bpf/*.c bpf/*.h abi/*.h kernel/*.c kernel/*.h kernel/tests/*.c kernel/tests/*.h crates/*/tests/*/*.c crates/*/tests/*/*.h)
SCRIPTS := $(wildcard scripts/*.sh tests/vm/*.sh) .ci/run

export PATH := $(PATH):$(HOME)/.cargo/bin

# Empty, unless the pinned toolchain is installed under another name only.
TOOLCHAIN := $(shell PATH="$(PATH)" scripts/toolchain.sh)
ifneq ($(TOOLCHAIN),)
export RUSTUP_TOOLCHAIN := $(TOOLCHAIN)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels test-devices lab-vm test-module build release bpf lint fmt fmt-check doc deny fuzz fuzz-build stress differential sanitize bench-build man install clean

help: ## print this list
	@echo "make demo and make test do all the set-up themselves; the rest is for work on Manylane."
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: setup release ## install missing packages, build, compare one shared socket with lanes, write a report
	@MANYLANE=$(PROGRAM) REPORT=$(REPORT) scripts/demo.sh

test: setup ## install missing packages, run all tests that this user can run, list the skipped ones
	@scripts/test.sh

test-kernels: ## run tests on other kernels, in virtual machines: make test-kernels [KERNEL=6.1] [CPUS=2] [TIER=loopback] [ONLY=gro]
	@scripts/setup.sh ci vm
	@tests/vm/kernels.sh

test-devices: build ## test engine xdp on devices other than veth, in virtual machines: make test-devices [KERNEL=5.10] [ONLY=bond]
	@scripts/setup.sh vm
	@MANYLANE=$(TARGET_DIR)/debug/manylane tests/vm/devices.sh

lab-vm: release ## run 'manylane lab' on a kernel that counts locks, in a virtual machine: make lab-vm [LAB="rivera --parts locks"] [CPUS=8]
	@scripts/setup.sh vm
	@MANYLANE=$(PROGRAM) REPORT=$(REPORT) tests/vm/lab.sh

test-module: ## test the kernel module in a virtual machine: make test-module [KERNEL=6.12, or debug] [ONLY=wakes]
	@scripts/setup.sh vm module
	@tests/vm/module.sh

setup: ## install missing build dependencies (packages of Debian or Ubuntu only)
	@scripts/setup.sh

build: ## build everything, with debug assertions
	$(CARGO) build --workspace

release: ## build the program and the preload library, optimized
	$(CARGO) build --release --package manylane-cli --package manylane-preload

bpf: ## compile the eBPF programs, after a change to them (needs clang, llvm, libbpf-dev)
	@scripts/bpf.sh

lint: ## run clippy with warnings as errors, and shellcheck
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	shellcheck --external-sources $(SCRIPTS)

fmt: ## format the Rust and C sources
	$(CARGO) fmt --all
	$(if $(C_FILES),clang-format -i $(C_FILES))

fmt-check: ## check the formatting
	$(CARGO) fmt --all --check
	$(if $(C_FILES),clang-format --dry-run --Werror $(C_FILES))

doc: ## build the documentation of the crates, with warnings as errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

deny: ## check licences, sources and duplicates of the dependencies
	$(CARGO) deny check bans licenses sources

fuzz-build: ## build the fuzz targets
	@scripts/setup.sh fuzz
	CARGO_TARGET_DIR=$(TARGET_DIR)/fuzz $(CARGO) build --manifest-path fuzz/Cargo.toml

fuzz: ## fuzz each target for a time: make fuzz SECONDS=600 [TARGETS=frame]
	@CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/fuzz scripts/fuzz.sh $(SECONDS) $(TARGETS)

stress: build ## make random calls under manylane run for a time: make stress SECONDS=600 [SEED=n]
	@MANYLANE=$(TARGET_DIR)/debug/manylane scripts/stress.sh $(SECONDS) $(SEED)

differential: build ## compare random calls with and without manylane run: make differential SECONDS=600 [SEED=n]
	@MANYLANE=$(TARGET_DIR)/debug/manylane scripts/differential.py $(SECONDS) $(SEED)

sanitize: setup ## test under AddressSanitizer, with a nightly toolchain: make sanitize [SANITIZERS="address thread"]
	@scripts/sanitize.sh $(SANITIZERS)

bench-build: ## build the benchmarks
	$(CARGO) build --workspace --benches

man: release ## write man pages to target/man, and completions of shells to target/completions
	$(PROGRAM) man --out $(TARGET_DIR)/man
	@mkdir -p $(TARGET_DIR)/completions
	$(PROGRAM) completions bash >$(TARGET_DIR)/completions/manylane
	$(PROGRAM) completions zsh >$(TARGET_DIR)/completions/_manylane
	$(PROGRAM) completions fish >$(TARGET_DIR)/completions/manylane.fish

install: ## install the results of 'make man' below DESTDIR/PREFIX (/usr/local)
	@test -x $(PROGRAM) -a -e $(LIBRARY) -a -d $(TARGET_DIR)/man || { echo "first, as the user who builds: make man" >&2; exit 1; }
	install -D -s -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/manylane
	install -D -s -m 644 $(LIBRARY) $(DESTDIR)$(PREFIX)/lib/manylane/libmanylane_preload.so
	install -D -m 644 $(TARGET_DIR)/completions/manylane $(DESTDIR)$(PREFIX)/share/bash-completion/completions/manylane
	install -D -m 644 $(TARGET_DIR)/completions/_manylane $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_manylane
	install -D -m 644 $(TARGET_DIR)/completions/manylane.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/manylane.fish
	for page in $(TARGET_DIR)/man/*.1; do \
		install -D -m 644 "$$page" "$(DESTDIR)$(PREFIX)/share/man/man1/$${page##*/}" || exit 1; \
	done

clean: ## remove build results and the report
	$(CARGO) clean
	rm -rf $(REPORT)
