"""The sampler as a graph: from templates that come with the package, which are made by tracing the torch module."""

from qsample.exporters.sampler.graph import export_sampler

__all__ = ["export_sampler"]
