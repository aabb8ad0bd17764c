"""What a scheme accepts and tells beyond the rule: further keywords, a context's model, an event loop that is busy."""

import asyncio
import inspect
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

import asyncsync
import asyncsync.sync
from helpers import planted
from helpers.apis import ASYNCIO, SETS, Api, bare
from helpers.pairs import Context, Model, fill, passed_on, read, receiver_of


class Noting:
    given: dict[str, Any] | None = None

    def create_transport(self, **kwargs: Any) -> Any:
        self.given = kwargs
        return super().create_transport(**kwargs)  # type: ignore[misc]


class Choosy:
    """Knows one keyword, which looks much like another."""

    def create_transport(self, *, worker_idx: int, mode: str = "") -> Any:
        self.mode = mode
        return super().create_transport(worker_idx=worker_idx)  # type: ignore[misc]


@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ZMQWeightSyncScheme", "map_above"),
        ("SharedMemWeightSyncScheme", "slots"),
        ("MultiProcessWeightSyncScheme", "slots"),
        ("DistributedWeightSyncScheme", "store_info"),
        ("RPCWeightSyncScheme", "num_workers"),
        ("RayWeightSyncScheme", "backend"),
        ("RayModuleTransformScheme", "backend"),
        ("NoWeightSyncScheme", "strategy"),
        ("Bus", "num_workers"),
    ],
)
def test_a_misspelt_keyword_is_refused_in_the_name_of_the_class_that_was_called(
    module: Any, name: str, meant: str
) -> None:
    kind, typo = getattr(module, name), meant[:-1]
    derived = type("Mine", (kind,), {})
    for called in (kind, derived):
        with pytest.raises(TypeError, match=rf"^{called.__name__}\(\).*'{typo}'.*'{meant}'"):
            called(**{typo: 3})
    with pytest.raises(TypeError, match=rf"^{name}\(\).*'colour'"):
        kind(colour="red")


@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", [name for name in asyncsync.__all__ if name.endswith("Scheme")])
def test_wrong_arguments_of_the_init_methods_are_refused_in_the_name_of_the_schemes_class(
    module: Any, name: str
) -> None:
    kind = getattr(module, name)
    if inspect.isabstract(kind):
        return
    scheme, model = kind(), Model()
    send, receive = scheme.init_on_sender, scheme.init_on_receiver
    refused: list[tuple[Any, str]] = [
        (lambda: send("policy", model=model), "sender.*model_id='policy'"),
        (lambda: send(model, num_workers=2), "sender.*model="),
        (lambda: send(num_worker=2), "sender.*'num_workers'"),
        (lambda: send(colour=2), "sender.*'colour'"),
        (lambda: receive(model=model), "receiver.*'model_id'"),
        (lambda: receive("policy", None, model), "receiver.*model="),
    ]
    for call, words in refused:
        with pytest.raises(TypeError, match=rf"^{name}\.init_on_{words}"):
            call()
    for method in (kind.init_on_sender, kind.init_on_receiver):
        assert "context" in inspect.signature(method).parameters or name == "RayModuleTransformScheme"


class Coloured:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.colour = options.pop("colour")
        super().__init__(*args, **options)

    def init_on_sender(self, colour: str, **options: Any) -> None:
        self.colour = colour
        super().init_on_sender(**options)


def test_methods_of_a_users_may_take_keywords_of_their_own(api: Api) -> None:
    scheme = api.extended(Coloured, num_workers=2, colour="red")
    assert (scheme.colour, scheme.bus.num_workers, passed_on(scheme).bus.num_workers) == ("red", 2, 2)
    with pytest.raises(TypeError, match="'num_workers'"):
        scheme.init_on_sender("blue", num_worker=2)
    scheme.init_on_sender("blue", model_id="policy", num_workers=2)
    assert (scheme.colour, scheme.model_id) == ("blue", "policy")


def test_a_model_that_is_given_as_the_context_is_to_be_given_as_the_model(api: Api) -> None:
    with pytest.raises(ValueError, match=r"'policy'.*model="):
        api.scheme().init_on_receiver("policy", Model(), worker_idx=0)
    with pytest.raises(ValueError, match="'policy'") as told:
        api.scheme().init_on_receiver("policy", SimpleNamespace(), worker_idx=0)
    assert "model=" not in str(told.value)


@pytest.mark.requirement(64)
@pytest.mark.schemes("every")
def test_a_receivers_further_keywords_go_to_its_transport(api: Api) -> None:
    scheme = bare(passed_on(api.extended(Noting)))
    scheme.init_on_receiver("policy", None, worker_idx=1, model=Model(), store="a store", rank=3)
    assert scheme.given == {"worker_idx": 1, "store": "a store", "rank": 3}
    plain = bare(passed_on(api.scheme()))
    plain.init_on_receiver("policy", None, worker_idx=1, model=Model(), store="a store")  # it needs none


@pytest.mark.requirement(64)
async def test_also_where_connect_says_which_worker_it_is(api: Api) -> None:
    sender = api.extended(Noting)
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    async with sender, receiver_of(sender, None, Model(), rank=3) as receiver:
        await asyncio.gather(sender.connect(timeout=10), receiver.connect(worker_idx=0, timeout=10))
        assert bare(receiver).given == {"worker_idx": 0, "rank": 3}


def test_a_misspelt_keyword_of_ours_is_refused(api: Api) -> None:
    scheme = bare(passed_on(api.scheme()))
    for typo, meant in (("inplase", "inplace"), ("gates", "gate"), ("worker_index", "worker_idx")):
        with pytest.raises(TypeError, match=rf"^ZMQ\w+\.init_on_receiver.*{typo}.*{meant!r}"):
            scheme.init_on_receiver("policy", worker_idx=0, model=Model(), **{typo: True})
    scheme.init_on_receiver("policy", worker_idx=0, model=Model())  # nothing was changed


def test_a_transports_own_keyword_may_look_like_one_of_ours(api: Api) -> None:
    scheme = bare(passed_on(api.extended(Choosy)))
    scheme.init_on_receiver("policy", worker_idx=0, model=Model(), mode="quick")
    assert scheme.mode == "quick"
    with pytest.raises(TypeError, match=r"'mode'.*'model'"):
        bare(passed_on(api.scheme())).init_on_receiver("policy", worker_idx=0, mode="quick")


# -- a sender's context ------------------------------------------------------------------------------------------------


@pytest.mark.requirement(83)
def test_a_context_without_the_model_has_none(api: Api) -> None:
    scheme = api.scheme()
    scheme.init_on_sender(model_id="value", context=Context(policy=Model(1)))
    assert (scheme.model, scheme.weights) == (None, None)
    own = Model(7)
    scheme.init_on_sender(model_id="policy", context=Context(policy=Model(1)), model=own)
    assert scheme.model is own


@pytest.mark.schemes("every")
def test_a_senders_model_is_not_overwritten(api: Api) -> None:
    source = Model(1)
    scheme = api.sender(source)
    with pytest.raises(RuntimeError, match="sender"):
        scheme.apply_weights(dict(Model(2).named_parameters()))
    assert read(source) == {1}


# -- an event loop that is busy ----------------------------------------------------------------------------------------

LARGE = 9 << 17  # elements: 4.5 MiB, which are fetched


async def test_an_event_loop_that_is_blocked_while_weights_are_to_be_fetched_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted.blocked_after(monkeypatch, 0.1)
    caplog.set_level(logging.WARNING, "asyncsync")
    async with ASYNCIO.crew(1, source=Model(1, LARGE), models=[Model(0, LARGE)]) as everybody:
        time.sleep(0.5)  # noqa: ASYNC251 - the case: nothing waits
        await asyncio.sleep(0.3)
        assert not [r for r in caplog.records if "blocked" in r.message]
        for value in (2, 3):
            version = await everybody.sender.publish(fill(everybody.source, value))
            time.sleep(0.5)  # noqa: ASYNC251
            await everybody.sender.wait_version(version, timeout=10)
        (told,) = [r.message for r in caplog.records if "blocked" in r.message]
        assert "worker(s) [0]" in told


@pytest.mark.parametrize("kind", [api for api in SETS["every"] if api.is_blocking and api.is_fast], ids=repr)
async def test_a_blocking_scheme_publishes_from_a_loop_that_is_busy_then(kind: Api) -> None:
    source, model = Model(1, LARGE), Model(0, LARGE)
    async with kind.crew(1, source=source, models=[model]) as everybody:
        version = await bare(everybody.sender).publish_async(fill(source, 2))
        assert version == everybody.sender.version == 2
        held = bare(everybody.receivers[0])
        deadline = time.monotonic() + 10
        while held.version < 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # noqa: ASYNC251 - this loop does not run
        assert read(model) == {2}
        assert await bare(everybody.sender).send_async(fill(source, 3)) == 3
        assert read(model) == {3}


async def test_publish_async_of_no_synchronisation_counts() -> None:
    scheme = asyncsync.sync.NoWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=Model())
    assert [await scheme.publish_async(), await scheme.send_async()] == [1, 2]
