"""The protocol: the state machines of trainer and worker. No asyncio, no ZeroMQ, no files, no clock."""
