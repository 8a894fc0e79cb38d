"""Checks of `scripts/healthcheck.py`: the machine, its devices, one collective, the sweep."""
