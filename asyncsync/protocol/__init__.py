"""The protocol: both state machines. No asyncio, no ZeroMQ, no files, no clock."""
