"""The bus: state machines, sockets and models brought together on an event loop.

Schemes use a ``BusCore`` (``core``). It has one link (``link``): the trainer's (``trainer`` over ``publishing``) or a
worker's (``worker`` over ``applying``). Both have an end of the fast path (``fast_path``), compare models
(``verifying``) and report their state (``status``). ``carrier`` has the interfaces of transports and schemes. Nothing
here decides which version a worker should have: the state machines do.
"""
