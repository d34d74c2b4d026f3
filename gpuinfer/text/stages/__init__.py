"""A text model in stages: each has some of its layers, with their share of the cache."""
