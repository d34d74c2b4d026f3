"""One server process owns the model, many processes ask it: rows in shared memory, tiny records on a local socket."""
