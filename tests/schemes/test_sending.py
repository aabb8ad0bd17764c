"""Sending and receiving: forms of weights, targets, versions, order, acknowledgements, late joiners, slow receivers."""

import asyncio
import inspect
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync import AckTimeout, ClosedError, NotConnected, PartialSendError, PeerLost, RemoteError, WeightStrategy
from helpers import planted
from helpers.apis import ASYNCIO, Api, bare
from helpers.pairs import Clock, Context, Model, connected, crew, fill, held, read, receiver_of, until
from helpers.processes import impatient

pytestmark = pytest.mark.schemes("every")


# -- push and pull


@pytest.mark.requirement(4, 218)
@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_weights_are_pushed_as_they_are_then_and_can_be_pulled(api: Api) -> None:
    async with api.crew(2, receiver={"apply": "on_receive"}) as everybody:
        sender, (first, second), models = everybody
        version = await sender.publish(fill(everybody.source, 1))
        fill(everybody.source, 99)
        assert everybody.read == [{0}, {0}], "on_receive: nothing is applied unasked"
        assert read(await first.fetch(timeout=5)) == {1}
        assert (first.version, read(models[0])) == (version, {1})
        assert read(await first.fetch(timeout=5)) == {1}, "also if it is here already"
        assert everybody.read == [{1}, {0}]
        with pytest.raises(PartialSendError):
            await sender.wait_version(version, timeout=0.1)
        assert read(await api.receive(second, 5)) == {1}
        await sender.wait_version(version, timeout=5)


# -- what is sent, and to whom


@pytest.mark.requirement(70)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
async def test_weights_may_be_none_a_module_a_tensordict_a_dict_or_one_for_each_worker(api: Api, strategy: str) -> None:
    async with api.crew(2, scheme=api.scheme(strategy)) as everybody:
        sender = everybody.sender
        for weights, expected in [
            (None, 1),
            (Model(2), 2),
            (TensorDict.from_module(Model(3)), 3),
            (TensorDict.from_module(Model(4)).to_dict(), 4),
            (Model(5).state_dict(), 5),
            (None, 1),
        ]:
            fill(everybody.source, 1)
            await sender.send_async(weights)
            assert everybody.read == [{expected}, {expected}]
        await sender.send_async({0: Model(6), 1: Model(7).state_dict()})
        assert everybody.read == [{6}, {7}]
        await sender.send_async({1: Model(8)})
        assert everybody.read == [{6}, {8}]


@pytest.mark.requirement(70, 80)
async def test_none_takes_the_model_from_the_context_and_a_string_is_a_path_in_it(api: Api) -> None:
    context = Context(policy=Model(1))
    context.env = SimpleNamespace(transform=[SimpleNamespace(module=Model(3), named={"critic": Model(2)})])  # type: ignore[attr-defined]
    async with api.crew(2, sender={"context": context}) as everybody:
        assert everybody.read == [{1}, {1}]
        context.models["policy"] = Model(4)
        await everybody.sender.send_async()
        assert everybody.read == [{4}, {4}], "the context is asked each time"
        for path, value in (("env.transform[0].module", 3), ("env.transform[0].named['critic']", 2)):
            await everybody.sender.send_async(path)
            assert everybody.read == [{value}, {value}]
            prepared = bare(everybody.sender).prepare_weights(path, "policy", everybody.sender.strategy, context)
            assert read(prepared) == {value}
        await everybody.sender.send_async({1: "policy"})
        assert everybody.read == [{2}, {4}], "or a name that get_model knows"
        with pytest.raises(ValueError, match=r"transform\[1\]"):
            await everybody.sender.send_async("env.transform[1]")
        assert everybody.sender.version == 5


@pytest.mark.requirement(71)
@pytest.mark.schemes("all")
async def test_worker_ids_choose_the_workers_and_the_others_keep_what_they_have(api: Api) -> None:
    async with api.crew(3) as everybody:
        sender = everybody.sender
        await sender.send_async(Model(1), worker_ids=0)
        assert everybody.read == [{1}, {0}, {0}]
        await sender.send_async(Model(2), worker_ids=iter([1, 2]))
        assert everybody.read == [{1}, {2}, {2}]
        assert [r.version for r in everybody.receivers] == [2, 3, 3]
        await sender.send_async(Model(3), worker_ids=None)
        assert everybody.read == [{3}, {3}, {3}]


@pytest.mark.requirement(72)
async def test_send_async_returns_when_the_workers_have_applied(api: Api) -> None:
    parameters = inspect.signature(api.WeightSyncScheme.send_async).parameters
    assert list(parameters) == ["self", "weights", "worker_ids", "timeout", "metadata", "quorum"]
    async with api.crew(2) as everybody:
        calls = [bare(everybody.sender).send_async(Model(value)) for value in range(1, 6)]
        versions = await asyncio.gather(*calls)
        assert versions == [2, 3, 4, 5, 6]
        assert everybody.read == [{5}, {5}]


# -- receiving


@pytest.mark.requirement(75)
@pytest.mark.schemes("waiting")
async def test_receive_returns_the_newest_update_once_or_none(api: Api) -> None:
    async with api.crew(1) as everybody:
        receiver = everybody.receivers[0]
        assert await receiver.receive(timeout=0) is None
        await everybody.sender.send_async(fill(everybody.source, 1))
        await everybody.sender.send_async(fill(everybody.source, 2))
        received = await receiver.receive(timeout=0)
        assert isinstance(received, TensorDictBase)
        assert read(received) == {2}
        assert set(received.keys(True, True)) == set(TensorDict.from_module(everybody.source).keys(True, True))
        assert await receiver.receive(timeout=0) is None


ENDS = {
    "an update": "",
    "the sender's goodbye": "the sender was shut down",
    "its own shutdown": "this receiver was shut down",
}


@pytest.mark.requirement(42, 44, 78)
@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
@pytest.mark.parametrize("end", ENDS)
async def test_without_a_timeout_receive_and_receive_weights_end_only_by_an_update_or_the_end(
    api: Api, end: str
) -> None:
    assert inspect.signature(api.WeightSyncScheme.receive).parameters["timeout"].default is None
    async with api.crew(2) as (sender, (one, other), _):
        calls = one.receive(timeout=None), api.receive_weights(other, None)
        blocked = [asyncio.create_task(call) for call in calls]
        done, _ = await asyncio.wait(blocked, timeout=0.1)
        assert not done
        with Clock(1.0):
            if end == "an update":
                await sender.publish(Model(1))
                assert [read(await each) for each in blocked] == [{1}, {1}]
                return
            for scheme in (sender,) if end == "the sender's goodbye" else (one, other):
                await scheme.shutdown()
            for each in blocked:
                with pytest.raises(ClosedError):
                    await each
        for receiver in (one, other):
            [after] = receiver.status().values()
            assert (after.state, after.reason) == ("lost", ENDS[end])


@pytest.mark.requirement(42, 192)
@pytest.mark.both_loops
async def test_cancelled_they_end_and_lose_nothing() -> None:
    async with crew(1) as (sender, (receiver,), _):
        for receive in (receiver.receive, receiver.receiver_transport.receive_weights):
            blocked = asyncio.create_task(receive())
            await asyncio.sleep(0)
            blocked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await blocked
            await sender.send_async(Model(1))
            assert read(await receive(0)) == {1}


@pytest.mark.requirement(43, 44, 78)
@pytest.mark.schemes("waiting")
@pytest.mark.both_loops
@pytest.mark.parametrize("timeout", [0, 0.0, 0.1])
async def test_an_expired_timeout_returns_none_and_loses_nothing(api: Api, timeout: float) -> None:
    async with api.crew(1) as (sender, (receiver,), _):
        for receive in (receiver.receive, partial(api.receive_weights, receiver)):
            start = time.monotonic()
            with Clock(timeout + 0.1):
                assert await receive(timeout) is None
            assert time.monotonic() - start >= timeout - 0.002, "uvloop's clock has whole milliseconds"
            await sender.send_async(Model(1))
            assert read(await receive(timeout)) == {1}
            assert await receive(timeout) is None


# -- versions and acknowledgements


@pytest.mark.requirement(193)
@pytest.mark.both_loops
async def test_every_update_has_a_version_that_both_sides_can_wait_for(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, (first, second), _ = everybody
        assert (sender.version, first.version) == (1, 1), "connect's initial weights are version 1"
        waiting = asyncio.create_task(second.wait_version(3, timeout=5))
        published = await sender.publish(fill(everybody.source, 1))
        sent = await sender.send_async(fill(everybody.source, 2))
        assert (published, sent, sender.version) == (2, 3, 3)
        await waiting
        assert [r.version for r in (first, second)] == [3, 3]
        await sender.wait_version(published), "it is past"
        one = await sender.publish(fill(everybody.source, 3), worker_ids=1)
        await sender.wait_version(one, worker_ids=1)
        assert (first.version, second.version, sender.version) == (3, 4, 4)
        await sender.wait_version(one), "for everybody means: for those whom it was for"
        with Clock(0.1), pytest.raises(AckTimeout, match="version 4"):
            await first.wait_version(4, timeout=0.1)


class Fussy(WeightStrategy):
    """A receiver's half that cannot take the number 13."""

    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        if (weights["first"] == 13).any():
            raise ArithmeticError("thirteen")
        return super().convert(weights, model)


@pytest.mark.requirement(195)
async def test_send_async_names_each_worker_that_failed_and_why(api: Api) -> None:
    async with api.crew(4) as everybody:
        sender, receivers, models = everybody
        fussy = api.beside(sender, Fussy())
        await receivers[1].shutdown()
        fussy.init_on_receiver("policy", model=(fussy_model := Model()), worker_idx=1)
        async with fussy:
            await fussy.connect(timeout=5)
            await receivers[2].shutdown()
            with held(receivers[3]), Clock(0.3), pytest.raises(PartialSendError) as caught:
                await sender.send_async(fill(everybody.source, 13), timeout=0.3)
            error = caught.value
            assert error.acked == {0: 2}
            assert {w: type(e) for w, e in error.failed.items()} == {1: RemoteError, 2: PeerLost, 3: AckTimeout}
            remote = error.failed[1]
            assert isinstance(remote, RemoteError)
            assert remote.type_name == "builtins.ArithmeticError"
            assert 'raise ArithmeticError("thirteen")' in remote.remote_traceback
            assert "it has left" in str(error.failed[2])
            assert "3 of 4" in str(error)
            assert (read(models[0]), read(fussy_model)) == ({13}, {0})
            await sender.send_async(fill(everybody.source, 14), worker_ids=[0, 1, 3])
            assert [read(m) for m in (models[0], fussy_model, models[3])] == [{14}] * 3


@pytest.mark.requirement(195)
async def test_a_lost_worker_ends_the_wait_at_once(api: Api) -> None:
    async with api.crew(1) as everybody:
        with held(everybody.receivers[0]):
            sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, 1), timeout=30))
            await until(lambda: everybody.sender.version == 2)
            await everybody.receivers[0].shutdown()
            with Clock(0.5), pytest.raises(PartialSendError, match="worker 0: PeerLost"):
                await sending


# -- publications that are under way at once get their versions in the order of the calls


class Slow:
    """Takes what it is given when an event of that value is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may: dict[float, asyncio.Event] = {}

    async def prepare_weights(self, weights: Any, model_id: Any, strategy: Any, context: Any = None) -> Any:
        if weights is not None and (event := self.may.get(weights.last[0].item())) is not None:
            await event.wait()
        return super().prepare_weights(weights, model_id, strategy, context)


@pytest.mark.promise(7)
async def test_a_publication_that_is_prepared_for_long_is_not_overtaken() -> None:
    async with crew(1, scheme=ASYNCIO.extended(Slow), source=Model(0)) as (sender, [worker], [model]):
        slow = sender.may[1] = asyncio.Event()
        first = asyncio.create_task(sender.publish(Model(1)))
        await asyncio.sleep(0)
        second = asyncio.create_task(sender.send_async(Model(2)))
        third = asyncio.create_task(sender.publish(Model(3)))
        await asyncio.sleep(0.05)
        assert [task.done() for task in (first, second, third)] == [False] * 3
        slow.set()
        assert (await first, await second, await third) == (2, 3, 4)
        await sender.wait_version(4)
        assert (worker.version, model()) == (4, {3})


async def test_one_that_fails_or_is_cancelled_makes_way_and_one_that_waits_has_a_deadline() -> None:
    async with crew(1, scheme=ASYNCIO.extended(Slow), source=Model(0)) as (sender, _, [model]):
        sender.may[1] = asyncio.Event()
        first = asyncio.create_task(sender.publish(Model(1)))
        await asyncio.sleep(0)
        with pytest.raises(PartialSendError, match=r"worker 0: AckTimeout: .*prepare_weights"):
            await sender.send_async(Model(2), timeout=0.05)
        assert sender.version == 1
        following = asyncio.create_task(sender.send_async(Model(3)))
        await asyncio.sleep(0)
        first.cancel()
        assert await following == 2
        assert model() == {3}


# -- workers that come and go


@pytest.mark.requirement(196)
@pytest.mark.both_loops
async def test_a_late_or_restarted_worker_gets_its_own_target_by_itself(api: Api) -> None:
    sender = api.sender(source := Model(1))
    async with connected(sender, receiver_of(sender, 0, first := Model())):
        await sender.send_async(fill(source, 2))
        one = receiver_of(sender, 1, late := Model())
        await one.connect(timeout=5)
        assert (read(late), one.version) == ({2}, 2), "a late worker has the newest when connect returns"
        await sender.send_async(Model(3), worker_ids=1)
        assert (read(first), read(late)) == ({2}, {3})
        await one.shutdown()
        async with receiver_of(sender, 1, restarted := Model()) as again:
            await again.connect(timeout=5)
            assert (read(restarted), again.version) == ({3}, 3), "its own target, not everybody's"
            assert read(first) == {2}
            await sender.send_async(fill(source, 4))
            assert (read(first), read(restarted)) == ({4}, {4})


@pytest.mark.requirement(198)
@pytest.mark.promise(13)
@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("width", [64, 1 << 20])
async def test_a_slow_receiver_delays_nobody_and_memory_stays_bounded(api: Api, width: int) -> None:
    sender = api.sender(source := Model(1, width))
    async with connected(sender, receiver_of(sender, 0, model := Model(width=width))):
        async with planted.mute_worker(sender, 1) as slow:
            await until(lambda: len(sender.status()) == 2)
            for value in range(2, 32):
                version = await sender.publish(fill(source, value))
                with Clock(1.0):
                    await sender.wait_version(version, worker_ids=0)
                assert read(model) == {value}
            assert planted.pool(sender).peak <= 5
            assert sender.status()[1].bytes_sent <= 2 * 4 * width + 4096
            assert await slow() == 1, "one update is outstanding at most"


@pytest.mark.requirement(198)
async def test_a_receiver_that_was_busy_skips_to_the_latest_version(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, (_, busy), _ = everybody
        with held(busy):
            for value in range(1, 11):
                version = await sender.publish(fill(everybody.source, value))
                await sender.wait_version(version, worker_ids=0, timeout=5)
            assert everybody.read == [{10}, {0}]
        await busy.wait_version(version, timeout=5)
        assert read(await api.receive(busy, 0)) == {10}
        assert await busy.receive(0) is None, "the versions in between never came"
        assert planted.pool(busy).peak <= 4


@pytest.mark.requirement(200)
@pytest.mark.schemes("addressed")
@pytest.mark.both_loops
async def test_status_tells_version_lag_last_seen_and_state_of_each_worker(api: Api) -> None:
    sender = api.scheme(num_workers=4)
    impatient(sender)
    sender.init_on_sender(model_id="policy", model=(source := Model(1)))
    zero, one, three = (receiver_of(sender, i, Model()) for i in (0, 1, 3))
    async with sender, zero, one, three:
        connecting = [asyncio.create_task(s.connect(timeout=0.5)) for s in (sender, zero, one, three)]
        async with planted.mute_worker(sender, 2):
            await asyncio.wait(connecting)
            assert isinstance(connecting[0].exception(), NotConnected), "worker 2 never applies"
            await three.shutdown()
            with held(one):
                version = await sender.publish(fill(source, 2))
                await sender.wait_version(version, worker_ids=0, timeout=5)
                states = ["live", "live", "slow", "lost"]
                await until(lambda: [s.state for s in sender.status().values()] == states)
                status = sender.status()
                assert list(status) == [0, 1, 2, 3]
                assert [(s.version, s.lag) for s in status.values()] == [(2, 0), (1, 1), (0, 2), (1, 1)]
                assert {s.target for s in status.values()} == {2}
                assert "it has left" in status[3].reason
                assert 0 <= status[0].last_seen < 3 <= 10 * status[2].last_seen
                mine = one.status()
                assert list(mine) == [1]
                assert (mine[1].version, mine[1].target, mine[1].lag, mine[1].state) == (1, 2, 1, "live")


@pytest.mark.requirement(200)
@pytest.mark.both_loops
async def test_a_timer_that_is_due_at_once_is_not_the_last(api: Api) -> None:
    """Of 200: liveness goes on. (uvloop makes no timer of one that is due within half a millisecond.)"""
    sender = api.scheme(num_workers=1)
    impatient(sender, ping_interval=1e-4, retry_interval=1e-4)
    sender.init_on_sender(model_id="policy", model=Model(1))
    async with connected(sender, receiver_of(sender, 0, Model())):
        await asyncio.sleep(0.6)
        await until(lambda: sender.status()[0].last_seen < 0.3)


@pytest.mark.requirement(84, 212)
async def test_an_elastic_sender_needs_min_workers(api: Api) -> None:
    assert inspect.signature(api.scheme_class).parameters["min_workers"].default == 1
    sender = api.sender(source := Model(1), scheme={"min_workers": 2})
    assert sender.sender_transports == {}
    async with sender, receiver_of(sender, 0, Model()) as zero, receiver_of(sender, 5, model := Model()) as five:
        early = asyncio.create_task(zero.connect(timeout=5))
        with Clock(0.2), pytest.raises(NotConnected, match="2 workers"):
            await sender.connect(timeout=0.2)
        await asyncio.gather(sender.connect(timeout=5), five.connect(timeout=5), early)
        assert sorted(sender.sender_transports) == [0, 5]
        await sender.send_async(fill(source, 2))
        assert read(model) == {2}
        await zero.shutdown()
        await until(lambda: sender.status()[0].state == "lost")
        with Clock(0.5), pytest.raises(NotConnected, match="min_workers=2"):
            await sender.send_async(fill(source, 3))
        async with receiver_of(sender, 1, late := Model()) as one:
            await one.connect(timeout=5)
            await sender.send_async()
            assert (read(model), read(late)) == ({3}, {3})


@pytest.mark.requirement(212, 195)
@pytest.mark.schemes("some")
async def test_a_send_for_which_there_is_no_worker_raises(api: Api) -> None:
    sender = api.sender(Model(1), num_workers=1)
    async with sender, receiver_of(sender, 0, model := Model(), model_id="value") as other:
        joining = asyncio.create_task(other.connect(timeout=30))
        with pytest.raises(NotConnected, match="'value'"):
            await sender.connect(timeout=0.5)
        version = bare(sender).version
        with Clock(0.5), pytest.raises(NotConnected, match="'value'"):
            await sender.send_async(timeout=5)
        assert bare(sender).version == version, "nothing was published"
        late = await sender.publish()
        with Clock(0.5), pytest.raises(NotConnected, match="'policy'"):
            await sender.wait_version(late, timeout=5)
        assert read(model) == {-1}
        await other.shutdown()
        with pytest.raises(ClosedError):
            await joining


@pytest.mark.requirement(212, 195)
@pytest.mark.schemes("some")
async def test_a_send_after_the_only_elastic_worker_has_left_raises(api: Api) -> None:
    sender = api.sender(Model(1))
    async with connected(sender, only := receiver_of(sender, 0, Model())):
        await only.shutdown()
        await until(lambda: sender.status()[0].state == "lost")
        with Clock(0.5), pytest.raises(NotConnected, match="min_workers=1"):
            await sender.send_async(timeout=5)
        version = await sender.publish()
        with Clock(0.5), pytest.raises(NotConnected, match="min_workers=1"):
            await sender.wait_version(version, timeout=5)


@pytest.mark.schemes("some")
async def test_an_optimisers_state_is_not_taken_for_weights_of_each_worker(api: Api) -> None:
    async with api.crew(2, models=[None, None]) as everybody:
        sender, receivers, _ = everybody
        tensors = list(everybody.source.parameters())
        state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p)} for i, p in enumerate(tensors)}
        assert {0, 1} <= state.keys(), "as Adam's state_dict()['state'] is"
        version = sender.version
        for weights in (state, {0: state[0], 1: state[1]}, {0: fill(everybody.source, 2), 1: state[1]}):
            with pytest.raises(ValueError, match="optimiser"):
                await sender.send_async({w: each for w, each in weights.items() if w < 2})
        assert sender.version == version, "nothing was published"
        own = {0: Model(3).state_dict(), 1: TensorDict.from_module(Model(4))}
        await sender.send_async(own)
        assert [read(await api.receive(r, 5)) for r in receivers] == [{3}, {4}]


@pytest.mark.schemes("zmq")
async def test_plain_dicts_for_each_worker_need_to_be_known_or_declared(api: Api) -> None:
    first, second = Model(3).state_dict(), Model(4).state_dict()
    undeclared = api.scheme()
    with pytest.raises(ValueError, match="params_map"):
        undeclared.init_on_sender(model_id="policy", weights={0: first, 1: second}, num_workers=2)
    undeclared.init_on_sender(model_id="policy", num_workers=2)
    with pytest.raises(ValueError, match="params_map="):
        await undeclared.connect(weights={0: first, 1: second}, timeout=5)
    async with api.crew(2, sender={"params_map": {0: first, 1: second}}) as everybody:
        assert everybody.read == [{3}, {4}]


# -- whose memory it is


@pytest.mark.requirement(218)
@pytest.mark.schemes("all")
@pytest.mark.parametrize("width", [64, 2 << 20])
async def test_nothing_that_was_returned_is_overwritten_by_a_later_update(api: Api, width: int) -> None:
    source, model, other = Model(1, width), Model(width=width), Model(0, width)
    async with api.crew(1, scheme=api.scheme(slots=2), source=source, models=[model]) as (sender, (receiver,), _):
        await sender.send_async(fill(source, 2))
        kept = {
            "receive_weights": await api.receive_weights(receiver, 5.0, model=other),
            "its model": TensorDict.from_module(other).detach(),
            "fetch": await receiver.fetch(5),
            "receiver.weights": receiver.weights,
            "sender.weights": sender.weights,
            "prepare_weights": bare(sender).prepare_weights(None, "policy", sender.strategy).clone(),
            "a copy of the model": TensorDict.from_module(model).detach().clone(),
        }
        await sender.send_async(fill(source, 2))
        kept["receive"] = await api.receive(receiver, 5)
        await sender.send_async(fill(source, 2))
        kept["its buffer"] = TensorDict.from_module(Model(0, width)).detach().clone()
        assert await api.receive_weights(receiver, 5.0, weights=kept["its buffer"]) is kept["its buffer"]
        for value in range(3, 8):
            await sender.send_async(fill(source, value))
        for name, weights in kept.items():
            assert read(weights) == {2}, name
        for weights in kept.values():
            for tensor in weights.values(True, True):
                tensor.detach().zero_()
        assert read(model) == read(source) == read(receiver.weights) == read(sender.weights) == {7}
        assert read(await api.receive(receiver, 0)) == read(await receiver.fetch(5)) == {7}


# -- what goes out when nobody waits for it


async def test_an_update_that_nobody_has_time_to_wait_for_goes_out_all_the_same(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        with pytest.raises(PartialSendError) as caught:
            await sender.send_async(fill(everybody.source, 1), timeout=0)
        assert sorted(caught.value.failed) == [0, 1]
        assert not planted.unsent(sender), "it has gone already, not with the next tick"
        await until(lambda: everybody.read == [{1}, {1}])
        version = sender.version
        with held(everybody.receivers[0]):
            task = asyncio.create_task(sender.send_async(fill(everybody.source, 2), timeout=30))
            await until(lambda: sender.version > version)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: everybody.read == [{2}, {2}])
