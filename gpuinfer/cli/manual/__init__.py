"""The pages of `docs/`, as they travel with the program: read, put in order, searched."""
