"""Other people's generators, and our own, each in a child process of its own, measured side by side."""
