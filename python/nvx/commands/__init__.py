"""What `nvx explain`, `nvx env` and `nvx topo` run."""
