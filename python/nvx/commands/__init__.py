"""What `nvx explain` and `nvx env` run."""
