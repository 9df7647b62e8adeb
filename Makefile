# Every target sets up what it needs by itself; scripts/run.sh says how. `make help` lists them.
#
#   PYTHON=...          the interpreter to use (default: the active one, if it has torch 2.11 to 2.15; else .venv)
#   TORCH_VERSION=...   the torch to install where there is none (default 2.13.0)
#   MAX_JOBS=...        compilers at once

export PYTHON TORCH_VERSION MAX_JOBS
.DEFAULT_GOAL := help
.PHONY: help demo test test-hosts test-slow check bench conformance clean

help:
	@echo "make demo         train a small model over nvx and over gloo, side by side (a few minutes the first time)"
	@echo "make test         the C++ and the Python tests (10 to 15 minutes on 2 cores)"
	@echo "make test-hosts   ranks on hosts of this machine's own making (network namespaces; needs root)"
	@echo "make test-slow    the tests that make test leaves out for their time"
	@echo "make check        the gates: formats, warnings, sanitizers, fuzzing, other architectures"
	@echo "make bench        all_reduce over nvx and gloo from 8 B to 64 MiB; 'nvx bench --help' has the rest"
	@echo "make conformance  torch's own DistributedTest over nvx, on 4 ranks"
	@echo "make clean        remove what these have built (.venv stays)"

demo test test-hosts test-slow check bench conformance:
	@scripts/run.sh $@

clean:
	rm -rf build
