"""Whether a model gives the same answers whichever way it is asked, on the user's own checkpoint."""
