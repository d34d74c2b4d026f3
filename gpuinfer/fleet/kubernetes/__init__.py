"""A server, or a run on many nodes, as manifests of Kubernetes: nothing here asks a cluster."""
