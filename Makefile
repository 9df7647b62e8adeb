# Every target sets up what it needs by itself; scripts/run.sh says how. `make help` lists them.
#
#   T=...               which tests `make test` runs: a folder (group, torch), a file, or a regular expression for names
#   PYTHON=...          the interpreter to use (default: the active one, if it has torch 2.11 to 2.15; else .venv)
#   TORCH_VERSION=...   the torch to install where there is none (default 2.13.0)
#   MAX_JOBS=...        compilers at once

export T PYTHON TORCH_VERSION MAX_JOBS
.DEFAULT_GOAL := help
.PHONY: help demo quick test test-install test-two-hosts test-rdma test-hosts test-slow test-frameworks check bench conformance wheels clean

help:
	@echo "make demo            train a small model over nvx and over gloo, side by side (a few minutes the first time)"
	@echo "make quick           style, and the core's C++ tests but for the long ones: for a change to the core (1 to 2 minutes; longer the first time)"
	@echo "make test            the C++ tests, and the Python tests of the library (about 7 minutes on 2 cores, after the build)"
	@echo "make test T=group    some of them: a folder, a file such as tests/torch/test_ddp.py, or a regular expression for names"
	@echo "make test-install    the tests of installation, commands and bench (3 minutes)"
	@echo "make test-two-hosts  the tests of ranks once more, on two hosts made by NVX_HOST_ID: over UCX and loopback, and over RDMA where there is any"
	@echo "make test-rdma       some of them on two hosts made by NVX_HOST_ID, over each active RDMA port (soft RoCE included); reports that it is skipped without one"
	@echo "make test-hosts      ranks on hosts of this machine's own making (network namespaces; needs root)"
	@echo "make test-slow       the tests that make test leaves out for their time"
	@echo "make test-frameworks  the scripts of examples/ with Accelerate, Lightning, Ray and others, in a venv of their own"
	@echo "make check           the gates: formats, warnings, sanitizers, fuzzing, other architectures"
	@echo "make bench           all_reduce over nvx and gloo from 8 B to 64 MiB; 'nvx bench --help' has the rest"
	@echo "make conformance     torch's own DistributedTest over nvx, on 4 ranks"
	@echo "make wheels          wheels for Python 3.10 to 3.13 and torch 2.11 to 2.15, audited and tried (5 minutes each on 2 cores)"
	@echo "make clean           remove what these have built (.venv stays)"

demo quick test test-install test-two-hosts test-rdma test-hosts test-slow test-frameworks check bench conformance wheels:
	@scripts/run.sh $@

clean:
	rm -rf build
