"""The uses of nvx that `pytest -m gpu` tries on GPUs: each part is a list of cases that all ranks run together. A case
compares its results with gloo's, or with those of one process. `gpu.ready` and its like prepare a rank's process."""
