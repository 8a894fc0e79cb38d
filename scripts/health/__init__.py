"""What `scripts/healthcheck.py` looks at: the machine, its devices, one collective, the sweep."""
