"""A model of text in stages: each has some of its layers, with their share of the cache."""
