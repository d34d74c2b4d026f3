"""What a server says of itself while it works: metrics for Prometheus, and the live page."""
