"""From what a scheme's ``create_transport`` returns to what the bus uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncsync.bus.carrier import Carrier
from asyncsync.transports.base import TransportCore
from asyncsync.transports.channel_receiver import WrappedReceiver
from asyncsync.transports.channel_sender import WrappedSender
from asyncsync.transports.channels import is_channel

if TYPE_CHECKING:
    from asyncsync.schemes.core import SchemeCore

__all__ = ["make_receiver", "make_sender"]


def make_sender(scheme: SchemeCore, workers: int | None) -> Carrier:
    """A sender's transport: one that serves all workers, or what wraps one blocking transport per worker.

    Args:
        scheme: creates them.
        workers: how many there are; None: they come and go.

    Raises:
        TypeError: ``create_transport`` returned something that is no transport.
    """
    first = _created(scheme, 0)
    if not is_channel(first):
        transport: Carrier = first
        return transport

    def create(worker: int) -> Any:
        made = _created(scheme, worker)
        if not is_channel(made):
            raise TypeError(
                f"create_transport returned a {type(made).__name__} for worker {worker}, which is of another kind than "
                f"worker 0's {type(first).__name__}"
            )
        return made

    return WrappedSender(first, create, workers)


def make_receiver(scheme: SchemeCore, worker: int, options: Mapping[str, Any]) -> Carrier:
    """A receiver's transport, wrapped if it is a blocking one of a user's own. Raises as :func:`make_sender`.

    Args:
        scheme: creates it.
        worker: its worker_idx.
        options: what ``init_on_receiver`` was given beyond its own arguments, for ``create_transport``.
    """
    made = _created(scheme, worker, **options)
    transport: Carrier = WrappedReceiver(made) if is_channel(made) else made
    return transport


def _created(scheme: SchemeCore, worker: int, **options: Any) -> Any:
    made = scheme.create_transport(worker_idx=worker, **options)
    if isinstance(made, TransportCore):
        made.bind(scheme)
    return made
