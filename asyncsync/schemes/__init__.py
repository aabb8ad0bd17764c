"""Weight-synchronisation schemes. All share scheme, aio and blocking; each other file has a backend, or a few."""
