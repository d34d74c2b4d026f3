"""What a model takes, known before it is spent: an estimate, and a child process that tries some small batches."""
