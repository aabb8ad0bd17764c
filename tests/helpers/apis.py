"""One face for both APIs and every scheme, so that one test proves a requirement for all of them.

    @pytest.mark.schemes("every")
    async def test_connect_delivers_the_initial_weights(api: Api) -> None:
        async with api.crew(2, source=Model(6)) as everybody:
            assert everybody.read == [{6}, {6}]

The `api` fixture in conftest.py runs it with each of :data:`SETS`' set of that name; without a mark, with ZeroMQ's
scheme in both APIs. With those of asyncio, ``api.scheme()`` and ``api.bus()`` are asyncsync's own objects. With the
blocking ones they are those of asyncsync.sync behind a :class:`Face`: each method that waits is an ordinary call in a
thread of its own, which the test awaits; everything else is the object's own.

A test without `api` is about asyncio alone: cancellation, event loops, or the internals of one class.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import asyncsync
import asyncsync.sync
from helpers.pairs import Clock, Crew, Model, connected, crew, passed_on, read


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread of its own, in this context. (asyncio.to_thread has few threads, on a small machine.)

    Cancelled, it leaves the thread to itself, as nothing can stop an ordinary call from outside.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(setter: str, value: Any) -> None:
        if not outcome.done():
            getattr(outcome, setter)(value)

    def call() -> None:
        try:
            setter, value = "set_result", context.run(function, *args, **kwargs)
        except BaseException as error:
            setter, value = "set_exception", error
        with contextlib.suppress(RuntimeError):  # the test is over
            loop.call_soon_threadsafe(tell, setter, value)

    thread = threading.Thread(target=call, name=f"caller of {function.__name__}", daemon=True)
    thread.start()
    try:
        return await outcome
    finally:
        if not outcome.cancelled():
            thread.join()  # at once: it has said all; but its frames hold what a test may wait to see freed


def free_port() -> int:
    """One on loopback, of those that no outgoing connection is given meanwhile."""
    while True:
        port = 16_000 + secrets.randbelow(16_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


_faces: weakref.WeakValueDictionary[int, Face] = weakref.WeakValueDictionary()


WAITS = {"connect", "publish", "stage", "wait_staged", "commit", "drop"}
WAITS |= {"wait_version", "wait_lag", "verify", "receive", "fetch", "shutdown"}


class Face:
    """A blocking scheme or bus whose methods that wait are awaited."""

    __slots__ = ("__weakref__", "bare")

    def __init__(self, bare: Any) -> None:
        object.__setattr__(self, "bare", bare)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.bare, name)
        return functools.partial(in_thread, found) if name in WAITS else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.bare, name, value)

    def __reduce__(self) -> Any:
        return face, (self.bare,)

    def __repr__(self) -> str:
        return repr(self.bare)

    @property
    def bus(self) -> Any:
        return face(self.bare.bus)

    async def send_async(self, *args: Any, **kwargs: Any) -> int:
        """``send``, which returns nothing; the version is right where nobody else sends meanwhile."""
        nothing = await in_thread(self.bare.send, *args, **kwargs)
        assert nothing is None
        return self.bare.version

    @asynccontextmanager
    async def take(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """``with take() as taken``, whose block begins and ends in a thread."""
        block = self.bare.take(*args, **kwargs)
        taken = await in_thread(block.__enter__)
        try:
            yield taken
        except BaseException as error:
            await in_thread(block.__exit__, type(error), error, error.__traceback__)
            raise
        else:
            await in_thread(block.__exit__, None, None, None)

    async def __aenter__(self) -> Face:
        entered = await in_thread(self.bare.__enter__)
        assert entered is self.bare
        return self

    async def __aexit__(self, *exc: object) -> None:
        await in_thread(self.bare.__exit__, *exc)


def face(bare: Any) -> Any:
    """The awaitable face of a blocking scheme or bus: always the same one."""
    if (known := _faces.get(id(bare))) is None:
        known = _faces[id(bare)] = Face(bare)
    return known


def bare(scheme: Any) -> Any:
    """What is behind a face; asyncio's objects are bare."""
    return scheme.bare if isinstance(scheme, Face) else scheme


def is_instant(scheme: Any) -> bool:
    """Whether ``receive`` returns nothing, at once: documented of the blocking SharedMem scheme."""
    return isinstance(bare(scheme), asyncsync.sync.SharedMemWeightSyncScheme)


@dataclass
class Family:
    """A bus with several models, and its workers' schemes and models."""

    bus: Any
    schemes: dict[str, Any]
    sources: dict[str, Any]
    workers: list[dict[str, Any]]
    models: list[dict[str, Any]]

    @property
    def buses(self) -> list[Any]:
        """The workers'."""
        return [next(iter(worker.values())).bus for worker in self.workers]

    @property
    def read(self) -> list[dict[str, set[float]]]:
        """The numbers in each worker's models."""
        return [{name: read(model) for name, model in mine.items()} for mine in self.models]


class Api:
    """One of the two APIs with one of the schemes; what has no name here is an attribute of its module.

    Args:
        name: of the test's parameter.
        module: asyncsync or asyncsync.sync.
        kind: what its scheme and transport are called: "ZMQ", "SharedMem", "MultiProcess", "Distributed", "Auto".
        is_fast: False: the fixture turns the fast paths off.
        is_far: True: the fixture has workers of odd indices claim to be on another host.
        options: of the scheme's constructor.
    """

    def __init__(
        self,
        name: str,
        module: ModuleType,
        kind: str = "ZMQ",
        *,
        is_fast: bool = True,
        is_far: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.module, self.kind, self.options = name, module, kind, options
        self.is_fast, self.is_far = is_fast, is_far
        self.is_blocking = module is asyncsync.sync
        self.scheme_class: Any = getattr(module, f"{kind}WeightSyncScheme")
        self.transport_class: Any = getattr(module, f"{kind.replace('MultiProcess', 'MP')}Transport")

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def is_instant(self) -> bool:
        return self.is_blocking and self.kind == "SharedMem"

    @property
    def has_slots(self) -> bool:
        """Whether weights travel through shared memory."""
        return self.kind in ("SharedMem", "MultiProcess")

    @property
    def other(self) -> Api:
        """The other API with the same scheme."""
        module = asyncsync if self.is_blocking else asyncsync.sync
        return Api(f"not {self.name}", module, self.kind, is_fast=self.is_fast, is_far=self.is_far, **self.options)

    def either(self, asyncio_class: type, blocking_class: type) -> type:
        """The one of a pair of classes that belongs to this API."""
        return blocking_class if self.is_blocking else asyncio_class

    def extended(self, mixin: type, *args: Any, **options: Any) -> Any:
        """A scheme of this kind, of a class with a mixin before it; pickles, as if of the mixin's module."""
        name = f"{mixin.__name__}{self.kind}{'Blocking' if self.is_blocking else ''}"
        module = sys.modules[mixin.__module__]
        if not hasattr(module, name):
            setattr(module, name, type(name, (mixin, self.scheme_class), {"__module__": mixin.__module__}))
        return self.make(getattr(module, name), *args, **{**self.options, **self.place, **options})

    @property
    def place(self) -> dict[str, Any]:
        """Options by which a scheme's workers find it before it has been initialised."""
        return {"store_info": ("127.0.0.1", free_port())} if self.kind == "Distributed" else {}

    def beside(self, sender: Any, *args: Any) -> Any:
        """A scheme that was constructed apart, for a worker of this sender."""
        store = getattr(sender, "get_store_info", lambda: None)()
        return self.scheme(*args, **({"endpoint": sender.bus.endpoint} if store is None else {"store_info": store}))

    def make(self, kind: type, *args: Any, bus: Any = None, **options: Any) -> Any:
        """An object of a class of this API, behind the common face."""
        if bus is not None:
            options["bus"] = bare(bus)
        made = kind(*args, **options)
        return face(made) if self.is_blocking else made

    def scheme(self, *args: Any, **options: Any) -> Any:
        """A scheme of this kind; the option ``slots`` is for those that have some."""
        if not self.has_slots:
            options.pop("slots", None)
        return self.make(self.scheme_class, *args, **{**self.options, **self.place, **options})

    def sender(self, model: Any = None, *, scheme: dict[str, Any] | None = None, **options: Any) -> Any:
        """A scheme of these options, initialised as the sender of a model."""
        made = self.scheme(**(scheme or {}))
        made.init_on_sender(**{"model_id": "policy", "model": model, **options})
        return made

    def bus(self, *args: Any, **options: Any) -> Any:
        return self.make(self.module.Bus, *args, **options)

    def crew(self, workers: int = 2, *, scheme: Any = None, **options: Any) -> AbstractAsyncContextManager[Crew]:
        """:func:`helpers.pairs.crew` with the schemes of this API."""
        return crew(workers, scheme=self.scheme() if scheme is None else scheme, **options)

    @asynccontextmanager
    async def family(
        self,
        workers: int = 1,
        *,
        names: tuple[str, ...] = ("policy", "value"),
        model: Callable[[float], Any] = Model,
        make: Callable[..., Any] | None = None,
        apart: bool = False,
        **receiver: Any,
    ) -> AsyncIterator[Family]:
        """A bus whose schemes send a model each, of 0, connected with its workers.

        Args:
            workers: how many.
            names: the model ids.
            model: makes one, full of a number.
            make: makes a sender's scheme of its name and ``bus=``; None: one of this kind.
            apart: each scheme is pickled by itself.
            receiver: further arguments of ``init_on_receiver``.
        """
        bus = self.bus(num_workers=workers)
        schemes = {name: self.scheme(bus=bus) if make is None else make(name, bus=bus) for name in names}
        sources = {name: model(0) for name in names}
        for name, scheme in schemes.items():
            scheme.init_on_sender(model_id=name, model=sources[name])
        theirs = [
            {name: passed_on(scheme) for name, scheme in schemes.items()} if apart else passed_on(schemes)
            for _ in range(workers)
        ]
        models = [{name: model(-1) for name in names} for _ in range(workers)]
        for index, (worker, mine) in enumerate(zip(theirs, models, strict=True)):
            for name, scheme in worker.items():
                scheme.init_on_receiver(name, model=mine[name], worker_idx=index, **receiver)
        made = Family(bus, schemes, sources, theirs, models)
        async with connected(bus, *made.buses):
            yield made

    async def receive(self, receiver: Any, timeout: float | None = None) -> Any:
        """The receiver's newest update, by ``receive``, or by ``fetch`` where that returns nothing, as documented."""
        if not is_instant(receiver):
            return await receiver.receive(timeout)
        with Clock(0.5):
            assert await receiver.receive(timeout) is None
        return await receiver.fetch(timeout=5)

    async def receive_weights(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        """The documented method of the receiver's transport."""
        method = receiver.receiver_transport.receive_weights
        return await (in_thread(method, *args, **kwargs) if self.is_blocking else method(*args, **kwargs))


ASYNCIO = Api("asyncio", asyncsync)
BLOCKING = Api("blocking", asyncsync.sync)

# Test models are small: they are copied, unless the scheme is told to give Parameters their memory in every slab.
_ALL = [
    ASYNCIO,
    BLOCKING,
    Api("asyncio-shared", asyncsync, "SharedMem"),
    Api("blocking-shared", asyncsync.sync, "SharedMem"),
    Api("asyncio-mapped", asyncsync, "SharedMem", map_above=0),
    Api("blocking-mapped", asyncsync.sync, "SharedMem", map_above=0),
    Api("asyncio-process", asyncsync, "MultiProcess"),
    Api("blocking-process", asyncsync.sync, "MultiProcess", map_above=0),
    Api("asyncio-received", asyncsync, map_above=0),
    Api("blocking-received", asyncsync.sync, map_above=0),
    Api("asyncio-auto", asyncsync, "Auto", is_far=True),
    Api("blocking-auto", asyncsync.sync, "Auto", is_far=True, map_above=0),
    Api("asyncio-general", asyncsync, "SharedMem", is_fast=False),
    Api("blocking-shared-general", asyncsync.sync, "SharedMem", is_fast=False),
]
_DISTRIBUTED = [
    Api("asyncio-distributed", asyncsync, "Distributed", map_above=0, pair_above=0),
    Api("blocking-distributed", asyncsync.sync, "Distributed", pair_above=0),
]
_EVERY = [
    *(api for api in _ALL if api.name not in ("asyncio-shared", "blocking-mapped", "blocking-received")),
    *_DISTRIBUTED,
]
_RECEIVED = [api for api in _ALL if api.name.endswith("-received")]
_IN_PLACE = [api for api in _ALL if api.name.endswith(("-mapped", "-process"))]

SETS: dict[str, list[Api]] = {
    "zmq": [ASYNCIO, BLOCKING],
    "every": _EVERY,
    "waiting": [api for api in _EVERY if not api.is_instant],
    "all": [*_ALL, *_DISTRIBUTED],
    "addressed": [api for api in _EVERY if api.kind != "Distributed"],
    "some": [ASYNCIO, BLOCKING, *(api for api in _ALL if api.name in ("asyncio-mapped", "blocking-process"))],
    "slots": [api for api in _ALL if api.has_slots],
    "copied": [api for api in _ALL if api.has_slots and not api.options and api.is_fast],
    "steady": [ASYNCIO, BLOCKING, *(api for api in _ALL if api.has_slots and not api.options and api.is_fast)],
    "general": [api for api in _ALL if not api.is_fast],
    "in place": _IN_PLACE,
    "map_above": [*_IN_PLACE, *_RECEIVED],
    "shared": [api for api in _ALL if api.kind == "SharedMem"],
    "instant": [api for api in _ALL if api.is_instant],
    "mapped": [api for api in _ALL if api.kind == "SharedMem" and api.options],
    "received": _RECEIVED,
    "re-pointed": [api for api in _ALL if api.name.endswith(("-mapped", "-received"))],
    "process": [api for api in _ALL if api.kind == "MultiProcess"],
    "distributed": _DISTRIBUTED,
}
"""What ``@pytest.mark.schemes(name)`` runs a test with: ZeroMQ's scheme in both APIs; every scheme in both; those of
them whose ``receive`` waits for an update; all ways in which each moves weights; some of them; through slots; out of
which they are copied; "steady": small updates take the fast paths; "received": Parameters lie in what came over ZeroMQ;
"re-pointed": they do, over ZeroMQ or in slots; … "addressed" is without those that find each other in a store,
"general" without the fast paths, "in place" and "map_above" are for tests that set ``map_above`` themselves, the latter
with ZeroMQ's scheme, too."""

QUICK = {"asyncio", "blocking-shared", "asyncio-mapped", "blocking-process", "asyncio-received"}
"""What the quick suite runs of each set: both APIs, every scheme, and all ways into a model."""
