"""Self-play, training, self-play: a network that learns from its own games, and how strong it has become."""
