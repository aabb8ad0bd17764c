"""Sockets and processes: addresses, keys, how a worker finds its trainer, the side channel between local processes."""
