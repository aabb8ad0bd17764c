"""Weights as bytes: nested weights, their layouts, slabs, and fast copies. No sockets, no asyncio, no clock."""
