"""The router: a relay at the level of HTTP between clients and the replicas of a fleet, in processes of its own."""
