"""Several replicas as one server: a router in front (`router`, `routing_policies`), supervision behind (`supervisor`),
replicas here or elsewhere (by a launcher).
"""
