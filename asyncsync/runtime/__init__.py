"""Threads, the process's one event loop on a thread of its own, the end of the process, and signals."""
