"""A file of prompts in, a file of answers out: once each, however often the run is broken off."""
