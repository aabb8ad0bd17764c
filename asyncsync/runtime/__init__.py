"""Threads, the process's one event loop, the end of the process, and signals."""
