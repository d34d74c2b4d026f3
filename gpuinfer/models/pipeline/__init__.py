"""A model in stages: its layers on several devices or groups of cores, and batches that go through them in turn."""
