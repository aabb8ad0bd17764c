"""Runtime: threads, the process's one loop thread, the end of the process, signals."""
