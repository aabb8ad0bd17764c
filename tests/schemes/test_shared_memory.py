"""What the schemes for one host promise alone: slots, mappings, copies of one's own, timeouts, who may take part."""

import asyncio
import gc
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from asyncsync import AckTimeout, ClosedError, PartialSendError, RemoteError, WeightStrategy, WeightSyncError
from helpers import planted
from helpers.apis import Api, bare
from helpers.memory import mappings
from helpers.pairs import Clock, Model, Stateful, connected, fill, held, passed_on, read, receiver_of, refusals, until

PARAMETERS = ["first", "inner.weight", "inner.bias", "last"]


def pool(sender: Any) -> Any:
    """The sender's slots."""
    return sender.shared_transport.pool


def file_of(tensor: torch.Tensor) -> int:
    """The inode of the file that a tensor's memory is in; 0: of none."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= address < stop:
            return int(inode)
    raise AssertionError("the tensor has no memory")


def files(model: Model) -> set[int]:
    """Those of a model's parameters."""
    return {file_of(parameter) for parameter in model.parameters()}


def addresses(model: Model) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}


# -- shared memory: one copy, one instruction, no further copy


@pytest.mark.requirement(27, 28)
@pytest.mark.promise(23)
@pytest.mark.schemes("mapped")
async def test_one_copy_into_a_slot_and_no_further_copy(api: Api) -> None:
    async with api.crew(3, source=Model(6)) as everybody:
        sender, _, models = everybody
        assert everybody.read == [{6}] * 3, "connect has handed the slot over"
        assert [files(model) for model in models] == [{slot.file.place.inode for slot in pool(sender).used}] * 3
        kept = [dict(model.named_parameters()) for model in models]
        buffers = [model.scale.data_ptr() for model in models]
        before = {w: s.bytes_sent for w, s in sender.status().items()}
        for value in range(1, 11):
            await sender.send_async(fill(everybody.source, value))
            assert len(set.union(*map(files, models)) - {0}) == 1, "they are all where the sender has written"
            for model, parameters, buffer in zip(models, kept, buffers, strict=True):
                assert dict(model.named_parameters()) == parameters, "the Parameters that an optimiser knows"
                assert all(map(planted.lies_in_a_slab, parameters.values()))
                assert model.scale.data_ptr() == buffer
                assert model() == {value}
        assert {w: s.bytes_sent for w, s in sender.status().items()} == before, "no weights on the socket"
        assert pool(sender).peak <= 3, "the target, what the last worker lets go of, and the spare"
        assert {slot.file.place.inode for slot in pool(sender).used} == files(models[0])


@pytest.mark.requirement(28)
@pytest.mark.schemes("in place")
@pytest.mark.parametrize("width", [64, 1 << 18])
async def test_small_weights_are_copied_out_and_their_slot_is_free_at_once(api: Api, width: int) -> None:
    scheme = api.scheme(slots=2, map_above=16 << 20)
    source, models = Model(0, width), [Model(width=width) for _ in range(2)]
    async with api.crew(2, scheme=scheme, source=source, models=models) as everybody:
        before = [addresses(model) for model in everybody.models]
        with held(everybody.receivers[1]):
            for value in range(1, 6):
                with Clock(0.5):
                    await everybody.sender.publish(fill(everybody.source, value))
                await everybody.sender.wait_version(value + 1, worker_ids=0, timeout=5)
        await everybody.receivers[1].wait_version(6, timeout=5)
        assert everybody.read == [{5}, {5}]
        assert [addresses(model) for model in everybody.models] == before
        assert pool(everybody.sender).peak <= 2


@pytest.mark.requirement(28)
@pytest.mark.schemes("re-pointed")
async def test_where_parameters_may_not_be_repointed_the_weights_are_copied(api: Api) -> None:
    """inplace=True; a tensor with other views; a model that is no module; shared, tied and frozen parameters."""
    flat = torch.zeros(9)
    viewed, shared, inplace = Model(), Model(), Model()
    viewed.last = nn.Parameter(flat[2:])
    shared.last.data.share_memory_()
    async with api.crew(4, models=[Model(), viewed, shared, TensorDict.from_module(Model()).clone()]) as everybody:
        receiver = receiver_of(everybody.sender, 3, inplace, inplace=True)  # instead of the TensorDict's
        table = everybody.models[3]
        where = {key: tensor.data_ptr() for key, tensor in table.items(True, True)}
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert [read(m) for m in everybody.models] == [{2}] * 4
        assert {key: tensor.data_ptr() for key, tensor in table.items(True, True)} == where
        assert flat.tolist() == [0.0] * 2 + [2.0] * 7, "the flat view still shows it"
        assert (file_of(viewed.last) == 0, shared.last.is_shared()) == (True, True)
        slots = {file_of(model.first) for model in (viewed, shared, everybody.models[0])}
        assert 0 not in slots
        assert len(slots) == (1 if api.kind == "SharedMem" else 3), "each receives its own, unless memory is shared"
        before = addresses(inplace)
        await everybody.receivers[3].shutdown()
        await receiver.connect(timeout=5)
        await everybody.sender.send_async(fill(everybody.source, 3), worker_ids=[0, 1, 2, 3])
        assert (addresses(inplace), read(inplace)) == (before, {3})
        assert files(inplace) == {0}
        await receiver.shutdown()


@pytest.mark.requirement(28)
@pytest.mark.promise(27, 33)
@pytest.mark.schemes("re-pointed")
@pytest.mark.parametrize("width", [64, 1 << 19], ids=["eager", "chunked"])
async def test_what_a_worker_writes_stays_its_own_until_the_next_update(api: Api, width: int) -> None:
    async with api.crew(2, source=Model(0, width), models=[Model(width=width), Model(width=width)]) as everybody:
        (first, second), sender, receiver = everybody.models, everybody.sender, everybody.receivers[0]
        optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
        for value in range(1, 8):
            await sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}], "whatever was written before"
            sum(p.sum() for p in first.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            for weights in (second, sender.weights, receiver.weights, await receiver.fetch(timeout=5)):
                assert read(weights) == {value}
            assert {float(p.detach().max()) for p in first.parameters()} == {value - 1}


class Tied(nn.Module):
    """One Parameter under two names, a frozen one, an empty one, a scalar, a transposed one, and an LSTM's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.decoder = nn.Linear(3, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.transposed = nn.Parameter(torch.zeros(4, 2).t())
        self.short = nn.Parameter(torch.zeros(5, dtype=torch.float16))
        self.lstm = nn.LSTM(2, 3)

    def forward(self) -> torch.Tensor:
        output, _ = self.lstm(torch.ones(1, 2))
        return torch.as_tensor(output.sum() + self.encoder.weight.sum() + self.scalar)


@pytest.mark.requirement(28, 29)
@pytest.mark.schemes("all")
async def test_tied_frozen_empty_scalar_and_transposed_parameters_arrive_and_stay_what_they_are(api: Api) -> None:
    source, models = Tied(), [Tied(), Tied()]
    before = [dict(model.named_parameters()) for model in models]
    async with api.crew(2, source=source, models=models) as everybody:
        for _ in range(4):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.normal_()
            await everybody.sender.send_async()
            expected = source()
            for model, parameters in zip(models, before, strict=True):
                assert model.decoder.weight is model.encoder.weight
                assert not model.frozen.requires_grad
                assert dict(model.named_parameters()) == parameters
                for name, tensor in source.state_dict().items():
                    assert torch.equal(model.state_dict()[name], tensor), name
                assert torch.equal(model(), expected)


@pytest.mark.promise(30)
@pytest.mark.schemes("all")
async def test_a_backward_through_weights_that_have_been_replaced_fails_instead_of_being_wrong(api: Api) -> None:
    async with api.crew(1) as everybody:
        (model,) = everybody.models
        for value in range(1, 7):
            loss = model.first.square().sum() + model.inner(torch.ones(4)).square().sum()
            await everybody.sender.send_async(fill(everybody.source, value))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        model.first.square().sum().backward()
        assert set(model.first.grad.tolist()) == {12.0}


# -- multiprocessing: to every worker its own copy


@pytest.mark.requirement(29)
@pytest.mark.schemes("process")
async def test_every_worker_gets_a_copy_of_its_own(api: Api) -> None:
    async with api.crew(2) as everybody:
        before = [addresses(model) for model in everybody.models]
        for value in range(1, 4):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            fill(everybody.models[0], -5)
            assert read(everybody.models[1]) == {value}
        assert [addresses(model) for model in everybody.models] == before, "in the model's own memory"
        assert [files(model) for model in everybody.models] == [{0}, {0}]


# -- shared memory's timeouts


@pytest.mark.requirement(48)
@pytest.mark.schemes("instant")
@pytest.mark.parametrize("timeout", [None, 0, 30.0])
async def test_the_blocking_transport_takes_any_timeout_and_is_instant(api: Api, timeout: float | None) -> None:
    async with api.crew(1, source=Model(1)) as (sender, (receiver,), _):
        with Clock(0.5):
            assert await api.receive_weights(receiver, timeout) is None, "connect's weights are returned"
            await sender.send_async(Model(2))
            buffer = TensorDict.from_module(Model(9)).detach().clone()
            assert await api.receive_weights(receiver, timeout, weights=buffer) is buffer
            assert read(buffer) == {2}
            assert await api.receive_weights(receiver, timeout) is None
        await sender.shutdown()
        await until(lambda: receiver.closed)
        with pytest.raises(ClosedError):
            await api.receive_weights(receiver, timeout)


@pytest.mark.requirement(77)
@pytest.mark.schemes("instant")
@pytest.mark.parametrize("apply", ["auto", "on_receive"])
async def test_blocking_receive_returns_nothing_at_once_and_the_model_has_the_update(api: Api, apply: str) -> None:
    async with api.crew(1, receiver={"apply": apply}) as everybody:
        sender, (receiver,), (model,) = everybody
        for value, timeout in ((1, None), (2, 0), (3, 30.0)):
            await sender.publish(fill(everybody.source, value))
            if apply == "auto":
                await receiver.wait_version(value + 1, timeout=5)
                assert read(model) == {value}, "without a receive"
            else:
                await until(lambda: receiver.bus.link.machine.staged)
                assert read(model) == {value - 1}, "not without one"
            with Clock(0.1):
                assert await receiver.receive(timeout) is None
            assert (read(model), read(receiver.weights)) == ({value}, {value})
            assert read(await receiver.fetch(timeout=5)) == {value}
        with receiver.hold(), Clock(0.1):
            await sender.publish(Model(4))
            assert receiver.bare.receive() is None, "in one's own hold, too: there is no waiting"
        assert read(await receiver.fetch(timeout=5)) == {4}
        await sender.publish(Model(5))
        await until(lambda: receiver.status()[0].target == sender.version)
        await sender.shutdown()
        await until(lambda: receiver.closed)
        if apply == "on_receive":
            assert await receiver.receive() is None, "it has applied what had come before"
        assert read(model) == {5}
        for timeout in (None, 0, 1.0):
            with Clock(0.1), pytest.raises(ClosedError):
                await receiver.receive(timeout)


@pytest.mark.requirement(48)
@pytest.mark.schemes("shared")
async def test_what_is_no_timeout_is_refused_all_the_same(api: Api) -> None:
    async with api.crew(1) as (_, (receiver,), _):
        for timeout in (-1, "1", True, float("nan")):
            for receive in (receiver.receive(timeout), api.receive_weights(receiver, timeout)):
                with pytest.raises((ValueError, TypeError), match="timeout"):
                    await receive


# -- whom an update is for, and several models


@pytest.mark.requirement(71)
@pytest.mark.schemes("slots")
async def test_each_worker_may_have_its_own_weights_and_these_need_no_more_slots_than_there_are(api: Api) -> None:
    async with api.crew(3, scheme=api.scheme(slots=2)) as everybody:
        sender = everybody.sender
        for turn in range(1, 6):
            await sender.send_async({w: Model(10 * turn + w) for w in range(3)}, timeout=5)
            assert everybody.read == [{10 * turn}, {10 * turn + 1}, {10 * turn + 2}]
            await sender.send_async(Model(turn), worker_ids=1, timeout=5)
            assert everybody.read == [{10 * turn}, {turn}, {10 * turn + 2}]
        await sender.send_async(Model(99), timeout=5)
        assert everybody.read == [{99}] * 3
        await until(lambda: len(pool(sender).used) == 1)


@pytest.mark.requirement(199)
@pytest.mark.schemes("slots")
@pytest.mark.parametrize("other", ["ZMQ", "SharedMem", "MultiProcess", "Auto"])
async def test_the_models_of_one_bus_may_travel_in_different_ways_and_switch_together(api: Api, other: str) -> None:
    def make(name: str, bus: Any) -> Any:
        if name == "policy":
            return api.scheme(bus=bus)
        return api.make(getattr(api.module, f"{other}WeightSyncScheme"), bus=bus)

    def both(policy: float, value: float) -> dict[str, set[float]]:
        return {"policy": {policy}, "value": {value}}

    async with api.family(2, make=make) as everybody:
        bus = everybody.bus
        for value in range(2, 8):
            with Clock(1.0):  # not after the 5 s in which bytes that are missing are asked for again
                await bus.send_async({name: Model(value) for name in everybody.schemes}, timeout=10)
            assert everybody.read == [both(value, value)] * 2
        with held(everybody.buses[1]):  # neither of the two, before both can
            await bus.publish({name: Model(8) for name in everybody.schemes})
            await bus.wait_version(bus.version, worker_ids=0, timeout=5)
            assert everybody.read == [both(8, 8), both(7, 7)]
        await bus.wait_version(bus.version, timeout=5)
        assert everybody.read == [both(8, 8)] * 2
        with pytest.raises(PartialSendError):
            await bus.send_async({"policy": Model(9), "value": Model(9, width=3)}, timeout=5)
        assert everybody.read == [both(8, 8)] * 2, "a worker that cannot take one of them takes none"
        await bus.send_async({"value": Model(9)}, timeout=5)
        assert everybody.read == [both(8, 9)] * 2


# -- whose memory it is


class Keeping(WeightStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        self.kept.append(weights)
        super().apply_weights(destination, weights, inplace)


@pytest.mark.requirement(24, 29, 218)
@pytest.mark.schemes("map_above")
async def test_what_a_hook_of_the_strategy_keeps_is_not_overwritten_and_a_late_worker_has_the_newest(api: Api) -> None:
    async with api.crew(1, scheme=api.scheme(Keeping(), slots=2, map_above=0)) as everybody:
        for value in range(1, 6):
            await everybody.sender.send_async(fill(everybody.source, value))
        assert [read(kept) for kept in everybody.receivers[0].strategy.kept] == [{value} for value in range(6)]
        await everybody.receivers[0].shutdown()
        async with receiver_of(everybody.sender, 0, model := Model()) as late:
            await late.connect(timeout=5)
            assert read(model) == {5}


@pytest.mark.requirement(218)
@pytest.mark.schemes("map_above")
async def test_a_model_outlives_its_scheme_unchanged(api: Api) -> None:
    async with api.crew(2, scheme=api.scheme(slots=2, map_above=0)) as everybody:
        await everybody.sender.send_async(fill(everybody.source, 1))
        fill(everybody.models[1].inner, 5)  # of its own
        await everybody.receivers[0].shutdown()
        await everybody.receivers[1].shutdown()
        again = receiver_of(everybody.sender, 0, model := Model())
        async with again:
            await again.connect(timeout=5)
            for value in range(2, 8):
                version = await everybody.sender.publish(fill(everybody.source, value))
                await everybody.sender.wait_version(version, worker_ids=0, timeout=5)
                assert read(model) == {value}
            assert read(everybody.models[0]) == {1}
            assert read(everybody.models[1].inner) == {5}
            assert set(everybody.models[1].last.tolist()) == {1.0}
            await everybody.sender.shutdown()
            assert read(model) == {7}


@pytest.mark.requirement(85)
@pytest.mark.schemes("in place")
async def test_shutdown_gives_the_slots_back_and_takes_the_mappings_down(api: Api) -> None:
    gc.collect()
    before = len(mappings())
    async with api.crew(2, scheme=api.scheme(map_above=0)) as everybody:
        for value in range(1, 4):
            await everybody.sender.send_async(fill(everybody.source, value))
        assert len(mappings()) > before
        slots = pool(everybody.sender)
        for scheme in (everybody.sender, *everybody.receivers):
            await scheme.shutdown()
        assert (slots.slabs, len(slots.used)) == (0, 0)
        assert everybody.read == [{3}, {3}], "the models keep what they have"
        everybody.models.clear()
        for receiver in everybody.receivers:
            bare(receiver).__dict__.update(_model=None, _binding=None)
    del everybody, receiver, scheme
    gc.collect()
    await until(lambda: len(mappings()) == before)


@pytest.mark.requirement(85)
@pytest.mark.schemes("map_above")
async def test_a_receiver_that_has_ended_maps_only_what_its_model_lives_in(api: Api) -> None:
    """At once, and not when a garbage collection comes: a mapping keeps its memory, and two descriptors."""
    gc.collect()
    before = len(mappings())
    gc.disable()
    try:
        async with api.crew(1, scheme=api.scheme(map_above=0)) as (sender, (receiver,), (model,)):
            for value in range(1, 4):
                await sender.send_async(fill(bare(sender).model, value))
            await sender.shutdown()
            await receiver.shutdown()
            assert read(model) == {3}
            assert len(mappings()) <= before + 1
    finally:
        gc.enable()


# -- slots that are all in use


@pytest.mark.requirement(195)
@pytest.mark.promise(26)
@pytest.mark.schemes("in place")
async def test_with_every_slot_in_use_send_ends_in_time_and_names_the_reader(api: Api) -> None:
    async with api.crew(2, scheme=api.scheme(slots=2, map_above=0)) as everybody:
        sender, (_, reader), models = everybody
        with held(reader):
            await sender.publish(fill(everybody.source, 1))
            await sender.wait_version(2, worker_ids=0, timeout=5)
            for _ in range(2):
                with Clock(0.2), pytest.raises(PartialSendError) as caught:
                    await sender.send_async(fill(everybody.source, 2), timeout=0.2)
                assert [type(error) for error in caught.value.failed.values()] == [AckTimeout] * 2
                for part in ("slot", "worker 1", str(os.getpid()), "slots="):
                    assert part in str(caught.value)
            assert (sender.version, everybody.read) == (2, [{1}, {0}]), "nothing was published"
        await sender.send_async(fill(everybody.source, 3), timeout=5)
        assert everybody.read == [{3}, {3}], "the reader has left, and it goes on"
        assert [read(m) for m in models] == [{3}, {3}]
        assert pool(sender).peak <= 3


@pytest.mark.requirement(192)
@pytest.mark.schemes("in place")
@pytest.mark.parametrize(
    "how", ["the reader leaves", "the reader is shut down", "cancelled", "the sender is shut down"]
)
async def test_publishing_waits_for_a_slot_and_goes_on_or_ends(api: Api, how: str) -> None:
    async with api.crew(2, scheme=api.scheme(slots=2, map_above=0)) as everybody:
        sender, (_, reader), models = everybody
        with held(reader):
            await sender.publish(fill(everybody.source, 1))
            waits = bare(sender).send_async(Model(2), timeout=30) if how == "cancelled" else sender.publish(Model(2))
            publishing = asyncio.ensure_future(waits)
            done, _ = await asyncio.wait({publishing}, timeout=0.1)
            assert not done
            if how == "the reader is shut down":
                ending = asyncio.create_task(reader.shutdown(timeout=0.5))
                await asyncio.wait({ending}, timeout=2)
            elif how == "cancelled":
                publishing.cancel()
                with Clock(0.5), pytest.raises(asyncio.CancelledError):
                    await publishing
                assert sender.version == 2
            elif how == "the sender is shut down":
                with Clock(0.5):
                    await sender.shutdown()
                    with pytest.raises(ClosedError):
                        await publishing
                return
        if how == "cancelled":
            await sender.send_async(fill(everybody.source, 2), timeout=5)
        else:
            with Clock(1.0):
                assert await publishing == 3
        assert sender.version == 3
        await sender.wait_version(3, worker_ids=0, timeout=5)
        assert read(models[0]) == {2}
        if how == "the reader is shut down":
            await ending
            assert read(models[1]) in ({0}, {1}, {2})
        else:
            await reader.wait_version(3, timeout=5)
            assert read(models[1]) == {2}


@pytest.mark.requirement(198)
@pytest.mark.promise(25)
@pytest.mark.schemes("in place")
async def test_a_reader_that_holds_one_slot_delays_nobody(api: Api) -> None:
    async with api.crew(2, scheme=api.scheme(slots=3, map_above=0)) as everybody:
        sender, (_, reader), models = everybody
        with held(reader):
            for value in range(1, 21):
                with Clock(0.2):
                    version = await sender.publish(fill(everybody.source, value))
                await sender.wait_version(version, worker_ids=0, timeout=5)
                assert read(models[0]) == {value}
            assert read(models[1]) == {0}
            assert pool(sender).peak <= 4
        await reader.wait_version(version, timeout=5)
        assert read(models[1]) == {20}, "it skips what came meanwhile"


# -- workers that cannot take part


@pytest.mark.requirement(195)
@pytest.mark.schemes("slots")
@pytest.mark.parametrize("arrange", [planted.no_permission, planted.another_namespace, planted.another_file])
async def test_a_worker_that_cannot_open_the_senders_memory_is_an_error_with_a_remedy_on_both_sides(
    api: Api, arrange: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = api.sender(Model(1), num_workers=1)
    receiver = receiver_of(sender, 0, model := Model())
    async with sender, receiver:
        with monkeypatch.context() as patch, Clock(1.0):
            arrange(patch)
            calls = (end.connect(timeout=10) for end in (sender, receiver))
            outcome = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcome[0], PartialSendError)
        assert isinstance(outcome[0].failed[0], RemoteError)
        assert isinstance(outcome[1], WeightSyncError)
        for error in (outcome[0], outcome[1]):
            assert "ZMQWeightSyncScheme" in str(error)
        assert read(model) == {-1}
        await sender.connect(timeout=10)
        await receiver.connect(timeout=10)
        assert read(model) == {1}, "and when it can, connect works"


@pytest.mark.requirement(195)
@pytest.mark.schemes("slots")
async def test_a_worker_that_can_open_it_no_longer_fails_that_update_only(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.crew(2) as everybody:
        with monkeypatch.context() as patch, Clock(1.0):
            planted.no_permission(patch)
            everybody.receivers[1].receiver_transport._attachments.clear()
            with pytest.raises(PartialSendError, match=r"worker 1: .*open"):
                await everybody.sender.send_async(fill(everybody.source, 1), timeout=10)
        await everybody.sender.send_async(fill(everybody.source, 2), timeout=10)
        assert everybody.read == [{2}, {2}]


@pytest.mark.requirement(195)
@pytest.mark.schemes("slots")
async def test_another_scheme_on_the_workers_side_is_named_with_the_remedy(api: Api) -> None:
    sender = api.sender(Model(1), num_workers=1)
    receiver = api.make(api.ZMQWeightSyncScheme, endpoint=sender.bus.endpoint)
    receiver.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    outcome = await refusals(sender, receiver)
    assert isinstance(outcome[0], PartialSendError)
    assert all("scheme class" in str(error) for error in outcome)
    assert read(model) == {-1}


@pytest.mark.schemes("slots")
async def test_a_worker_of_such_a_scheme_takes_what_a_zmq_sender_has(api: Api) -> None:
    """The other mixture is none: the bytes come on the bus, whatever the worker's transport."""
    sender = api.make(api.ZMQWeightSyncScheme)
    sender.init_on_sender(model_id="policy", model=(source := Model(1)), num_workers=1)
    receiver = api.scheme(endpoint=sender.bus.endpoint)
    receiver.init_on_receiver("policy", model=(model := Model()), worker_idx=0)
    async with connected(sender, receiver):
        await sender.send_async(fill(source, 2), timeout=10)
        assert (read(model), files(model)) == ({2}, {0})


# -- configuration


@pytest.mark.schemes("slots")
@pytest.mark.parametrize(("name", "wrong"), [("slots", 1), ("slots", 2.0), ("slots", True), ("map_above", -1)])
def test_the_constructor_refuses(api: Api, name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=name):
        api.scheme(**{name: wrong})


@pytest.mark.requirement(13, 213)
@pytest.mark.schemes("map_above")
def test_slots_and_map_above_travel_with_a_pickle_and_a_conversion(api: Api) -> None:
    scheme = api.scheme("state_dict", slots=7, map_above=123)
    other = bare(scheme).aio if api.is_blocking else scheme.blocking
    assert type(other) is api.other.scheme_class
    assert inspect.signature(type(other)).parameters["map_above"].default == 4 << 20
    for each in (scheme, passed_on(scheme), other, passed_on(other)):
        each.init_on_sender(model_id="policy", model=Model(), num_workers=1)
        assert (pool(each) if api.has_slots else each.shared_transport).map_above == 123
        assert not api.has_slots or pool(each).slots_allowed == 7
        assert each.strategy.extract_as == "state_dict"


# -- updates that a worker fails to apply, or that its own code meddles with


@pytest.mark.requirement(195)
@pytest.mark.schemes("map_above")
async def test_a_worker_that_fails_every_update_holds_up_nobody(api: Api) -> None:
    models, scheme = [Stateful(), Stateful()], api.scheme("state_dict", map_above=0)
    async with api.crew(2, scheme=scheme, source=Stateful(0), models=models) as everybody:
        models[1].broken = True
        for version in range(2, 12):
            with pytest.raises(PartialSendError) as caught:
                await everybody.sender.send_async(fill(everybody.source, version), timeout=5)
            assert {worker: type(error) for worker, error in caught.value.failed.items()} == {1: RemoteError}
            assert everybody.read == [{version}] * 2, "the tensors were there before its own code has failed"


class Sharing(WeightStrategy):
    """Moves what it is given into memory that other processes can open, as a multiprocessing queue would."""

    def convert(self, weights: Any, model: Any) -> Any:
        return {name: tensor.share_memory_() for name, tensor in weights.flatten_keys(".").items()}


@pytest.mark.schemes("shared")
async def test_a_convert_that_moves_its_tensors_gets_the_next_version_all_the_same(api: Api) -> None:
    source, model = Model(1, width=1 << 18), Model(0, width=1 << 18)
    assert 1 << 20 < sum(p.nbytes for p in source.parameters()) < 16 << 20
    scheme = api.scheme(Sharing(), map_above=16 << 20)
    async with api.crew(1, scheme=scheme, source=source, models=[model]) as everybody:
        for value in range(2, 7):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}]


@pytest.mark.requirement(85)
@pytest.mark.schemes("shared")
async def test_a_worker_that_ends_before_an_update_could_be_applied_reads_the_slot_no_more(api: Api) -> None:
    source, model = Model(1, width=1 << 18), Model(0, width=1 << 18)
    scheme = api.scheme(map_above=0)
    async with api.crew(1, scheme=scheme, source=source, models=[model]) as (sender, (receiver,), _):
        link = bare(receiver).bus.link
        with held(receiver):
            await sender.publish(fill(source, 3))
            await until(lambda: link.gate.pending)
            waiting = [a for a in link.transports["policy"]._attached if a.is_used]
            assert waiting
            link.gate.withdraw = lambda: False  # as after an interrupt in the middle of an apply
            await receiver.shutdown()
        assert all(one.is_detached for one in waiting)


@pytest.mark.schemes("copied")
async def test_extra_state_that_moves_another_models_tensors_costs_that_no_update(api: Api) -> None:
    class Moving(Model):
        others: tuple[Model, ...] = ()

        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            for other in self.others:
                other.first.data = other.first.detach().clone()

    async with api.family(model=Moving, make=lambda name, bus: api.scheme("state_dict", bus=bus)) as everybody:
        (models,) = everybody.models
        for value in (2, 3, 4, 5):
            if value == 4:
                models["policy"].others = (models["value"],)
            await everybody.bus.send_async({name: fill(source, value) for name, source in everybody.sources.items()})
            assert everybody.read == [{"policy": {value}, "value": {value}}]
