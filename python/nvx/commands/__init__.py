"""What `nvx explain`, `nvx env`, `nvx topo` and `nvx gpucheck` run."""
