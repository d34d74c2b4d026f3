"""Self-play: many games in lockstep, a tree search for each move, one block of leaves a round."""
