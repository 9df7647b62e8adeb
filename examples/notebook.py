"""Accelerate's notebook_launcher, which forks the ranks of a notebook: NVX_AS=gloo python examples/notebook.py

In a notebook, set the variable before the first import of torch, or call nvx.serve_as("gloo") in a cell.
"""

import sys

import compare
from accelerate import notebook_launcher
from accelerate_ddp import train

if __name__ == "__main__":
    compare.main(lambda: notebook_launcher(train, num_processes=2), command=[sys.executable, __file__])
