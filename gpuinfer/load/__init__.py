"""A load of requests: when they arrive, and what they ask for."""
