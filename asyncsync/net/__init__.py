"""Sockets and processes: endpoints, file descriptors, the side channel of processes of one host."""
