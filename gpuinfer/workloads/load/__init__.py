"""A load of requests for any backend that takes rows: drawn, with clients that wait and think, or recorded."""
