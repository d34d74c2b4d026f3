"""The only queue: who may wait, when a batch is cut, how its requests are settled."""
