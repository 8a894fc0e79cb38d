"""Past one machine: files are read and output is encoded by the workers of a Dask cluster."""

from aggregate.cluster.connection import Cluster, connect

__all__ = ["Cluster", "connect"]
