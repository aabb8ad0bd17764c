"""A user's own subclass of asyncsync.sync.WeightSyncScheme: every documented hook is an ordinary method."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase

from asyncsync import PartialSendError, RemoteError
from asyncsync.sync import WeightSyncScheme, ZMQTransport
from helpers.apis import BLOCKING
from helpers.pairs import Model, fill, read


class Scheme(WeightSyncScheme):
    """Sends halves and applies them doubled; notes each call with the thread that it came in."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor
        self.calls: list[str] = []
        self.refuses: float | None = None

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        self.calls.append("create_transport")
        return ZMQTransport()

    def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> TensorDict:
        self.calls.append(f"prepare_weights in {threading.current_thread().name}")
        return super().prepare_weights(weights, model_id, strategy, context) / self.factor

    def apply_weights(self, weights: TensorDictBase, inplace: bool = True) -> None:
        self.calls.append("apply_weights")
        if self.refuses is not None and self.refuses in read(weights):
            raise ArithmeticError("not this one")
        super().apply_weights(weights * self.factor, inplace)

    def shutdown(self, timeout: float = 5.0) -> None:
        super().shutdown(timeout)
        self.calls.append("shutdown")


@pytest.mark.requirement(214)
async def test_every_hook_of_a_users_scheme_is_called_and_may_call_super() -> None:
    async with BLOCKING.crew(2, scheme=BLOCKING.make(Scheme, 2.0), source=Model(4)) as everybody:
        sender, receivers = everybody.sender.bare, [r.bare for r in everybody.receivers]
        assert everybody.read == [{4}, {4}]
        assert [r.factor for r in receivers] == [2.0, 2.0], "what a subclass adds travels with its pickle"
        sender.calls.clear()
        sender.send(fill(everybody.source, 6))
        assert sender.calls == [f"prepare_weights in {threading.current_thread().name}"], "in the caller's thread"
        assert everybody.read == [{6}, {6}]
        assert read(receivers[0].receive(timeout=5)) == {3}, "receive returns what was sent"
    assert sender.calls[-1] == "shutdown"
    assert sender.closed
    for receiver in receivers:
        calls = [call for call in receiver.calls if "prepare" not in call]
        assert calls[-4:] == ["create_transport", "apply_weights", "apply_weights", "shutdown"]


@pytest.mark.requirement(214)
async def test_a_users_apply_weights_that_raises_fails_that_update_with_its_traceback() -> None:
    async with BLOCKING.crew(2, scheme=BLOCKING.make(Scheme, 1.0)) as everybody:
        everybody.receivers[1].bare.refuses = 13
        with pytest.raises(PartialSendError) as caught:
            everybody.sender.bare.send(Model(13), timeout=5)
        error = caught.value.failed[1]
        assert isinstance(error, RemoteError)
        assert 'raise ArithmeticError("not this one")' in error.remote_traceback
        assert everybody.read == [{13}, {0}]
        everybody.sender.bare.send(Model(14), timeout=5)
        assert everybody.read == [{14}, {14}]
