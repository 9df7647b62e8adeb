"""What `nvx status`, `nvx topo`, `nvx explain` and `nvx env` run."""
