"""The bus: state machines, sockets and models brought together on an event loop."""
