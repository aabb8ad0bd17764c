"""What a scheme knows: its configuration, its role in this process, the documented read-only properties, and what it
refuses in which state.

Configuration travels with a pickled scheme; everything else belongs to one role in one process and stays behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from asyncsync.arguments import KnownKeywords, check_processes, check_timeout
from asyncsync.bus.carrier import Carrier
from asyncsync.bus.core import BusCore
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import BusStatus
from asyncsync.errors import ClosedError, WeightSyncError
from asyncsync.model.readers import Hold
from asyncsync.model.selection import Selection
from asyncsync.model.strategy import WeightStrategy, flat_weights, resolve_strategy
from asyncsync.monitor.options import Tracing
from asyncsync.net.keys import KeyFile
from asyncsync.schemes.receiving import Receiving
from asyncsync.schemes.sources import Sources, as_tensordict, by_worker, find_model
from asyncsync.schemes.torchrl_contexts import TorchRLContext
from asyncsync.transports.channels import ChannelReceiver, ChannelSender
from asyncsync.weights.packing import copy_flat
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import MAX_NAME
from asyncsync.wire.metadata import Shown


class SchemeState(KnownKeywords):
    """The state of a scheme."""

    _bus_class: ClassVar[type[BusCore]]
    _takes_part: ClassVar[bool] = True  # in a bus that it shares

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        endpoint: str | None = None,
        connect: str | None = None,
        bus: BusCore | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        allow_plaintext: bool = False,
        compress: str | None = None,
        delta: bool = False,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        strict: bool = False,
        server_key: KeyFile | Sequence[KeyFile] | None = None,
        clients: KeyFile | None = None,
        client_key: KeyFile | None = None,
        metrics_port: int | str | None = None,
        tracing: Tracing = None,
    ) -> None:
        """Configuration only: nothing is bound or connected before ``connect``.

        Args:
            strategy: ``"tensordict"`` (default), ``"state_dict"``, or a :class:`WeightStrategy` instance.
            endpoint: where the sender binds; None draws a private ipc path.
            connect: where workers connect, if that differs.
            bus: a :class:`Bus` of the same API, shared with other schemes, instead of one of its own.
            num_workers: fixed number of workers; None: elastic.
            min_workers: how many an elastic sender needs; 0: it can start alone.
            allow_plaintext: allow addresses beyond this host, unencrypted.
            compress: ``"zstd"`` or ``"lz4"``: bytes that travel over the bus are compressed, for workers that can
                decode it.
            delta: a worker that has the version before the newest gets over the bus what has changed since. The sender
                keeps that version, too.
            include: patterns, ``"actor.*"``, of the dotted names of the weights that are sent and received; everything
                else of the receivers' models stays as it is. None: all weights.
            exclude: patterns of those that are not, of these.
            strict: names that match no pattern, in the source, in what has come or in a receiver's model, are an error.
            server_key: with keys, the path of the server's certificate: at the sender the secret file, at a receiver
                the public one, or several while the server's key is being replaced.
            clients: at the sender: the directory with the public certificates of those that are let in.
            client_key: at a receiver: the path of its secret certificate; ``{worker_idx}`` in it stands for its index.
            metrics_port: serve figures for Prometheus there, from ``connect`` on; see :class:`Bus`.
            tracing: tell each version's life as OpenTelemetry's spans, or to a function; see :class:`Bus`.

        Raises:
            ValueError: an unknown strategy or codec, no pattern, an address that is not safe or cannot work, or counts
                that disagree.
            ImportError: the codec's library is not installed.
            TypeError: a bus of the other API.
        """
        self.strategy = resolve_strategy(strategy)
        self._selection = Selection(include, exclude, strict=strict)
        self._own_bus = bus is None
        if bus is None:
            bus = self._bus_class(
                endpoint,
                connect=connect,
                num_workers=num_workers,
                min_workers=min_workers,
                allow_plaintext=allow_plaintext,
                server_key=server_key,
                clients=clients,
                client_key=client_key,
                metrics_port=metrics_port,
                tracing=tracing,
                compress=compress,
                delta=delta,
            )
        elif (
            endpoint or connect or min_workers != 1 or allow_plaintext or server_key or clients or client_key
            or metrics_port is not None or tracing is not None or compress or delta
        ):  # fmt: skip
            raise ValueError(
                "endpoint, connect, min_workers, allow_plaintext, keys, metrics_port, tracing, compress and delta "
                "belong to the Bus; pass them to Bus(...), not together with bus="
            )
        elif not isinstance(bus, self._bus_class):
            raise TypeError(
                f"{type(self).__module__}.{type(self).__name__} needs a {self._bus_class.__module__}.Bus, not a "
                f"{type(bus).__module__}.{type(bus).__name__}: a bus and its schemes have the same API, both blocking "
                "or both asynchronous"
            )
        elif not self._takes_part:
            bus, self._own_bus = self._bus_class(num_workers=num_workers), True
        elif num_workers is not None:
            bus.agree_on_workers(num_workers, private=False)
        self._bus = bus
        self._topic = ""  # the model's name on the bus
        self._devices: list[torch.device] | None = None
        self._reset()

    def _reset(self) -> None:
        self._role: str | None = None
        self._pid = 0
        self._context: Any = None
        self._model: Any = None
        self._worker_idx: int | None = None
        self._sources = Sources()  # a sender's
        self._receiving: Receiving | None = None
        self._reconnect = False
        self._carrier: Carrier | None = None
        self._registered = False
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: no sockets, tasks, models or weights. What a subclass adds travels with it.
        return {k: v for k, v in self.__dict__.items() if k not in LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    @property
    def bus(self) -> BusCore:
        """The bus that this scheme is on."""
        return self._bus

    @property
    def model_id(self) -> str | None:
        """Name of the model; None when unset."""
        return self._topic or None

    @property
    def model(self) -> Any:
        """The registered model, on a sender with a context that one's; None when unset."""
        if self._role == "sender" and self._sources.registered is None:
            return find_model(self._context, self.model_id)
        return self._model

    @property
    def context(self) -> Any:
        """The context object; None when unset."""
        context = self._context
        return context.target if isinstance(context, TorchRLContext) else context

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None when unset."""
        return self._worker_idx

    @property
    def weights(self) -> TensorDict | None:
        """A copy of the current weights; None when there are none.

        Sender: of the registered source, else of what was published last. Receiver: what came last and was applied.
        """
        source = self._sources.weights if self._sources.weights is not None else self.model
        if self._role == "sender" and source is not None and not by_worker(source):
            return as_tensordict(copy_flat(self._selection.part(flat_weights(self.strategy, source))))
        return self._bus._look(self._held_weights)

    def _held_weights(self) -> TensorDict | None:
        link = self._bus._link
        if isinstance(link, ReceiverLink):
            held = link.subscriber.holdings.held.get(self._topic)
            return None if held is None else held[2].copy().weights()
        if isinstance(link, SenderLink):
            target = link.caught_up().targets.newest(-1, self._topic)
            return None if target is None else _packed(target.slab).copy().weights()
        return None

    @property
    def sender_transports(self) -> dict[int, Any]:
        """``{worker_idx: transport}``; one object serves all, unless it is a blocking one of a user's own. Empty on a
        receiver."""
        if self._role != "sender" or self._carrier is None:
            return {}
        link = self._bus._link
        workers: Iterable[int] = range(self._bus.num_workers or 0)
        if isinstance(link, SenderLink):
            workers = self._bus._look(lambda: link.publisher.membership.expected())
        if isinstance(self._carrier, ChannelSender):
            channels = self._carrier.channels
            return {worker: channels[worker] for worker in workers if worker in channels}
        return dict.fromkeys(workers, self._carrier)

    @property
    def receiver_transport(self) -> Any:
        """The receiver's transport; None on a sender, and before ``connect`` where that says which worker this is."""
        if self._role != "receiver":
            return None
        return self._carrier.channel if isinstance(self._carrier, ChannelReceiver) else self._carrier

    @property
    def shared_transport(self) -> Any:
        """The transport that serves all workers; None on a receiver, and where each worker has one of its own."""
        return None if self._role != "sender" or isinstance(self._carrier, ChannelSender) else self._carrier

    @property
    def version(self) -> int:
        """Sender: the newest version published on this bus; one that a worker has refused was not. Receiver: the
        version that the model shows. 0: none.

        On a receiver it switches with the model: inside a ``hold()`` it is the version of what is read there.
        """
        link = self._bus._link
        return link.version((self._topic,)) if isinstance(link, ReceiverLink) else self._bus.version

    @property
    def metadata(self) -> dict[str, Any]:
        """What was published with :attr:`version` as ``metadata=``, a dict of the caller's own; empty where there was
        none. On a receiver it switches with the model, as the version does."""
        return self._bus._metadata((self._topic,))

    def state_dict(self) -> dict[str, int]:
        """Sender: what a checkpoint has to keep for versions to go on where they were: ``{"version": …}``.

        Raises:
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        return self._bus.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sender: go on from the version of a checkpoint; the next one published is its successor. Before ``connect``
        or after it; the schemes of one bus share the count.

        Raises:
            ValueError: this is no such state, or it would take the version back; nothing was changed.
            ClosedError: this scheme was shut down.
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._bus.load_state_dict(state)

    @property
    def closed(self) -> bool:
        """True once this side was shut down, or the sender has said goodbye."""
        return self._closed or self._bus.closed

    def status(self) -> BusStatus:
        """Per worker its applied version, target, lag, last seen, and state. A receiver tells of itself and its
        sender. What was refused for the sake of keys is in its ``refused``."""
        return self._bus._status([self._topic])

    def hold(self) -> Hold[Shown]:
        """A block (``with`` or ``async with``) in which no update is applied. ``with scheme.hold() as held``:
        ``held.version`` and ``held.metadata`` are those of what is read there."""
        self._check_open()
        return self._bus._hold((self._topic,))

    def __repr__(self) -> str:
        about = f"model_id={self.model_id!r}, role={self._role}, endpoint={self._bus.endpoint!r}"
        return f"{type(self).__name__}({self.strategy!r}, {about})"

    # -- what is refused -----------------------------------------------------------------------------------------------

    def _check_fresh(self, role: str) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down; construct another")
        if self._registered and self._pid == os.getpid():
            raise RuntimeError("this scheme is connected; init comes before connect")
        self._bus._check_role(role)

    def _check_name(self, model_id: str | None) -> None:
        if model_id is not None and not isinstance(model_id, str):
            raise TypeError(f"model_id must be a string, not {model_id!r}")
        if model_id is not None and len(model_id) > MAX_NAME:
            raise ValueError(f"model_id has {len(model_id)} characters; {MAX_NAME} are allowed")

    def _check_worker(self, worker_idx: int | None) -> None:
        if worker_idx is None:
            return
        if not isinstance(worker_idx, int) or isinstance(worker_idx, bool) or worker_idx < 0:
            raise ValueError(f"worker_idx must be an int from 0, not {worker_idx!r}")
        count = self._bus.num_workers
        if count is not None and worker_idx >= count:
            raise ValueError(
                f"worker_idx {worker_idx} does not exist: num_workers={count}, so choose from 0 to {count - 1}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down; construct another")
        if self._role is None or self._pid != os.getpid():
            if self._registered:
                raise RuntimeError(
                    "this scheme was connected before the fork; a forked child cannot use it: "
                    "pass it on before connecting"
                )
            raise RuntimeError("init_on_sender() or init_on_receiver() comes first")
        self._bus._check_open(self._role)

    def _check_connect(
        self, weights: Any, worker_idx: int | None, timeout: float, processes: Iterable[Any] = ()
    ) -> None:
        check_timeout(timeout)
        self._bus._starting = check_processes(processes)
        self._check_open()
        if self._role == "sender" and worker_idx is not None:
            raise TypeError("worker_idx belongs to a receiver's connect(); this is the sender")
        if self._role == "receiver" and weights is not None:
            raise TypeError("weights belong to the sender's connect(); this is a receiver")
        if self._role == "receiver" and self._bus._starting:
            raise TypeError("processes belong to the sender's connect(); this is a receiver")

    def _check_receive(self, timeout: float | None) -> None:
        check_timeout(timeout, or_none=True)
        if timeout is not None and self._carrier is not None and not self._carrier.supports_timeout:
            raise ValueError("this scheme's transport has no timeouts (supports_timeout is False): receive without one")
        self._check_open()

    def _check_not_held(self, timeout: float | None = None) -> None:
        """In the caller's thread: refuse a wait that would never end."""
        gate = self._bus._gate
        if timeout is None and gate is not None and gate.held_by_caller:
            raise RuntimeError(
                "receive() without a timeout inside a hold() of one's own, which keeps updates out, would wait for "
                "itself: leave the hold first, or give a timeout"
            )


LOCAL = {
    "_role", "_pid", "_context", "_model", "_worker_idx", "_sources", "_receiving", "_reconnect", "_carrier",
    "_registered", "_closed",
}  # fmt: skip


def _packed(slab: Slab) -> Slab:
    """Wait for the thread that packs this slab: it takes milliseconds."""
    deadline = time.monotonic() + 10.0
    while slab.packed < slab.nbytes:
        if time.monotonic() > deadline:
            raise WeightSyncError("the weights are still being packed after 10 s")
        time.sleep(0.0005)
    return slab
