"""A server under load: who asks when, what it answered and how fast, and how sure one can be of the sender itself."""
