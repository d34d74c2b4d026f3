"""A launcher for gpuinfer: replicas and nodes in sandboxes of Modal. Never run against the real service."""
