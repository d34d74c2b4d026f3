"""Training of a network on the positions that self-play has left."""
