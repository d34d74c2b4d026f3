"""One run on many machines: a coordinator that hands out ranges of units, and nodes that compute them."""
