"""The GPU tests of `pytest -m gpu`. Each part is a list of cases that all ranks run together. A case compares its
results with those of gloo or of one process. `gpu.ready` and similar modules prepare a rank's process."""
