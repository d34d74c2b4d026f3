"""A template for gpuinfer plugins."""
