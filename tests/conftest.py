"""Settings for every test."""

from hypothesis import settings

# Machines that run tests are shared: how long one example takes says nothing.
settings.register_profile("megascan", deadline=None)
settings.load_profile("megascan")
