"""From what a scheme's ``create_transport`` returns to the carrier that the bus uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncsync.bus.carrier import Carrier
from asyncsync.transports.channel_receiver import ChannelReceiver
from asyncsync.transports.channel_sender import ChannelSender
from asyncsync.transports.channels import is_channel

__all__ = ["make_receiver", "make_sender"]


def make_sender(create: Callable[[int], Any], workers: int | None) -> Carrier:
    """A sender's carrier: one transport that serves all workers, or one blocking transport per worker.

    Args:
        create: makes the transport of a worker, by its worker_idx.
        workers: how many there are; None: they come and go.

    Raises:
        TypeError: ``create`` returned something that is no transport.
    """
    first = create(0)
    if not is_channel(first):
        carrier: Carrier = first
        return carrier

    def create_channel(worker: int) -> Any:
        made = create(worker)
        if not is_channel(made):
            raise TypeError(
                f"create_transport returned a {type(made).__name__} for worker {worker}, which is of another kind than "
                f"worker 0's {type(first).__name__}"
            )
        return made

    return ChannelSender(first, create_channel, workers)


def make_receiver(transport: Any) -> Carrier:
    """A receiver's carrier: the transport itself, or what makes one of a blocking transport of a user's own. Raises as
    :func:`make_sender`."""
    carrier: Carrier = ChannelReceiver(transport) if is_channel(transport) else transport
    return carrier
