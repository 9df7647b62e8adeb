"""The commands `nvx status`, `nvx drill`, `nvx tune`, `nvx explain`, `nvx topo` and `nvx env`."""
