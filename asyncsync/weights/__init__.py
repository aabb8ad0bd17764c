"""Weights as bytes: nested weights and their paths, layouts, slabs, and fast copies. No sockets, no asyncio, no
clock."""
