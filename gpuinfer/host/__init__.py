"""This machine and this process: cores and who uses them, event loops, signals, child processes."""
