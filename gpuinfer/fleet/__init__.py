"""Several replicas as one server: a router in front, supervision behind, replicas here or elsewhere."""
