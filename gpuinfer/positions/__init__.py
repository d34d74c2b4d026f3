"""Searched positions on disk: what self-play leaves and training reads."""
