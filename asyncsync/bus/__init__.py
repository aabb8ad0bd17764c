"""The bus: state machines, sockets and models brought together on an event loop.

Schemes use a ``BusCore`` (``core``). It has one link (``link``): the trainer's, ``trainer`` over ``publishing``, or a
worker's, ``worker`` over ``applying``. Both have their end of the fast path (``steady``) and tell how they are
(``status``). What moves bytes, and what brings models, is behind ``carrier``. Nothing here decides what a worker should
have: the state machines do.
"""
