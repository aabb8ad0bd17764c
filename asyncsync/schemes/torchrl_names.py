"""What TorchRL's collectors ask of a scheme, and set on it: names of TorchRL's "WeightSyncScheme" page that nobody else
needs. The blocking classes have them; an asynchronous scheme refuses the first one that TorchRL asks for.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper
from typing import Any, NoReturn, TypeVar

from asyncsync.arguments import checked
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.schemes.scheme import Scheme
from asyncsync.schemes.sources import Sources
from asyncsync.schemes.torchrl_contexts import START_SECONDS, TorchRLContext, adapted, count_as_theirs

T = TypeVar("T")


class Refusal:
    """A name that a scheme has not; TorchRL, which asks for it, shows why."""

    def __get__(self, scheme: Any, owner: type) -> NoReturn:
        raise AttributeError(
            f"this is the asyncio {owner.__name__}, and TorchRL calls ordinary methods: hand it `scheme.blocking`, or "
            f"a {owner.__name__} of asyncsync.sync"
        )


class TorchRLNames(Scheme):
    """The names of a blocking scheme. ``model``, ``context`` and ``worker_idx`` may be set before it is initialised:
    then they stand for what ``init_on_sender`` or ``init_on_receiver`` are not given."""

    # The workers of a sender get both with the scheme: seconds that connect() waits at least, and the number by which
    # TorchRL's collector calls the first of them.
    _patience: float = 0.0
    _first_number: int = 0
    _preset: Mapping[str, Any]

    @abstractmethod
    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop of the blocking API."""

    def _reset(self) -> None:
        super()._reset()
        self._preset = {}
        count_as_theirs(TorchRLNames)

    @checked
    def init_on_sender(self, **options: Any) -> None:
        super().init_on_sender(**self._completed(options, "model", "context"))
        if isinstance(self._context, TorchRLContext) and self._context.num_workers is not None:
            self._patience = START_SECONDS
            self._first_number = self._context.first_number

    update_wrapper(init_on_sender, Scheme.init_on_sender)

    @checked
    def init_on_receiver(self, model_id: str, context: Any = None, **options: Any) -> None:
        options = self._completed({**options, "context": context}, "model", "context", "worker_idx")
        if self._first_number and options.get("worker_idx") is not None:
            options["worker_idx"] -= self._first_number
        super().init_on_receiver(model_id, **options)

    update_wrapper(init_on_receiver, Scheme.init_on_receiver)

    def _completed(self, options: Mapping[str, Any], *names: str) -> dict[str, Any]:
        preset = {name: value for name, value in self._preset.items() if name in names and options.get(name) is None}
        return {**options, **preset}

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the sender, in this process."""
        count_as_theirs(TorchRLNames)  # TorchRL may have been imported since; this is what it asks first
        return self._role == "sender" and self._pid == os.getpid()

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this is a receiver, in this process."""
        count_as_theirs(TorchRLNames)
        return self._role == "receiver" and self._pid == os.getpid()

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether this is the sender, and connected."""
        return self.initialized_on_sender and self._registered

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this is a receiver, and connected."""
        return self.initialized_on_receiver and self._registered

    @property
    def strategy_str(self) -> str:
        """``"tensordict"`` or ``"state_dict"``."""
        return self.strategy.extract_as

    @property
    def model(self) -> Any:
        """The registered model, on a sender with a context that one's; None when unset.

        Set on a sender, it is what a bare ``send()`` sends. Set on a receiver, it takes the place of the other: it has
        the current weights when this returns, and gets the updates from then on.
        """
        return self._preset.get("model") if self._role is None else super().model

    @model.setter
    def model(self, model: Any) -> None:
        if self._role is None:
            self._preset = {**self._preset, "model": model}
        elif self._role == "sender":
            old = self._sources
            self._sources = Sources(self.model_id, old.context, model=model, device_map_fn=old.device_map_fn)
            self._model = model
        elif model is not self._model and (receiving := self._receiving) is not None:
            self._model = model
            link, timeout = self._bus._link, max(DEFAULT_TIMEOUT, self._patience)
            if isinstance(link, ReceiverLink):
                self._run(lambda: receiving.replace(link, model, timeout))
            else:
                receiving.bind(model)

    @property
    def context(self) -> Any:
        """The context object; None when unset. Set on a receiver, it learns of each update from the next one on."""
        return self._preset.get("context") if self._role is None else super().context

    @context.setter
    def context(self, context: Any) -> None:
        if self._role is None:
            self._preset = {**self._preset, "context": context}
            return
        self._context = self._sources.context = context = adapted(context)
        link = self._bus._link
        if self._registered and isinstance(link, ReceiverLink):
            if isinstance(context, TorchRLContext):
                context.connected = True
            self._bus._look(lambda: link.pass_on(self._topic, context))

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None when unset."""
        return self._preset.get("worker_idx") if self._role is None else self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if worker_idx == self.worker_idx:
            return
        if self._role is None:
            self._preset = {**self._preset, "worker_idx": worker_idx}
        elif self._role == "sender" or self._worker_idx is not None:
            who = "the sender" if self._role == "sender" else f"worker {self._worker_idx}"
            raise RuntimeError(f"this is {who} already: worker_idx belongs to a receiver, and is set once")
        else:
            self._check_worker(worker_idx)
            self._worker_idx = worker_idx
