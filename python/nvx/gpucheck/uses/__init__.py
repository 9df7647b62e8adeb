"""What torch makes of nvx on GPUs: `python -m nvx.gpucheck.uses PART`. Each part is a list of cases that all ranks run
together; a case holds what it gets against gloo, or against the same in one process."""
