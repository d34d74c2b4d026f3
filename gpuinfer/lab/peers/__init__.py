"""Other people's generators, and our own, each in a child process of its own, measured side by side.

The children (`with_*`) may run in another Python, so they import only `peer_protocol` and the standard library at their
top.
"""
