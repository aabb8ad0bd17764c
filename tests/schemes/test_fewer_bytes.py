"""``compress`` and ``delta``: fewer bytes travel, and every worker has what was sent."""

from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import Bus, ZMQWeightSyncScheme
from helpers import planted
from helpers.apis import Api
from helpers.pairs import connected, passed_on, receiver_of

WIDTH = 1 << 18  # of bfloat16: half a MiB for each of six tensors
SIZE = 6 * 2 * WIDTH


class Trained(nn.Module):
    """Six tensors, of which training changes the last three, each number by a little."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(WIDTH).to(torch.bfloat16) for _ in range(6)])

    def forward(self) -> None:
        """Nothing."""

    def train_a_little(self) -> None:
        with torch.no_grad():
            for part in list(self.parts)[3:]:
                part.mul_(1 + 2**-7 * (torch.rand(WIDTH) < 0.1))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.promise(35)
@pytest.mark.parametrize(
    ("variant", "limit"),
    [
        pytest.param({"compress": "zstd"}, 0.8, marks=pytest.mark.thorough),
        pytest.param({"compress": "lz4"}, 0.9, marks=pytest.mark.thorough),
        pytest.param({"delta": True}, 0.7, marks=pytest.mark.thorough),
        ({"compress": "zstd", "delta": True}, 0.25),  # whole pieces that have not changed
    ],
)
@pytest.mark.parametrize("inplace", [None, pytest.param(True, marks=pytest.mark.thorough)])
async def test_each_update_is_whole_and_travels_as_fewer_bytes(
    api: Api, variant: dict[str, Any], limit: float, inplace: bool | None
) -> None:
    source, models = Trained(), [Trained(), Trained()]
    scheme, options = api.scheme(map_above=0, **variant), {"inplace": inplace}
    async with api.crew(2, scheme=scheme, source=source, models=models, receiver=options) as (sender, receivers, _):
        before = sender.status()[1].bytes_sent
        assert before <= SIZE
        for _ in range(3):
            source.train_a_little()
            await sender.send_async()
            assert [same(source, model) for model in models] == [True, True]
        assert (sender.status()[1].bytes_sent - before) / 3 < limit * SIZE
        assert [r.bus.dropped for r in receivers] == [{}, {}]
        assert sender.bus.dropped == {}


async def test_what_a_worker_writes_into_its_model_does_not_spoil_what_comes_next(api: Api) -> None:
    """Its Parameters lie where the base of the next update is; what it writes stays in them."""
    source, model = Trained(), Trained()
    scheme = api.scheme(map_above=0, delta=True, compress="zstd")
    async with api.crew(1, scheme=scheme, source=source, models=[model]) as (sender, receivers, _):
        before = sender.status()[0].bytes_sent
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            source.train_a_little()
            await sender.send_async()
            assert same(source, model)
        assert sender.status()[0].bytes_sent - before < SIZE
        assert receivers[0].bus.dropped == {}


@pytest.mark.promise(36)
async def test_a_worker_that_is_late_or_behind_or_has_its_own_gets_all(api: Api) -> None:
    source, models = Trained(), [Trained(), Trained()]
    sender = api.sender(source, num_workers=2, scheme={"delta": True, "map_above": 0})
    first, late = (receiver_of(sender, i, model) for i, model in enumerate(models))
    async with connected(sender, first, late):
        own = Trained()
        await sender.send_async(own, worker_ids=1)
        assert same(own, models[1])
        counts = [sender.status()[i].bytes_sent for i in range(2)]
        for turn in range(2):
            source.train_a_little()
            await sender.send_async()
            assert [same(source, model) for model in models] == [True, True]
            now = [sender.status()[i].bytes_sent for i in range(2)]
            assert now[0] - counts[0] < 0.7 * SIZE, "it had the version before"
            assert (now[1] - counts[1] < 0.7 * SIZE) is (turn == 1), "it had one of its own, then it had that"
            counts = now


@pytest.mark.promise(38)
async def test_a_worker_without_the_library_gets_bytes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.no_codecs(monkeypatch)
    source, model = Trained(), Trained()
    sender = ZMQWeightSyncScheme(num_workers=1, compress="zstd")
    sender.init_on_sender(model_id="policy", model=source)
    async with connected(sender, receiver_of(sender, 0, model)):
        assert same(source, model)
        assert sender.status()[0].bytes_sent == SIZE


async def test_a_piece_that_cannot_be_encoded_travels_as_it_is(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, model = Trained(), Trained()
    scheme = api.scheme(compress="zstd")
    async with api.crew(1, scheme=scheme, source=source, models=[model]) as (sender, _, _):
        planted.encode_fails_once(monkeypatch)
        for _ in range(2):
            source.train_a_little()
            await sender.send_async(source, timeout=10)
            assert same(source, model)
        assert [record.levelname for record in caplog.records].count("ERROR") == 1
        assert sender.status()[0].bytes_sent < 2.9 * SIZE


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
async def test_small_updates_are_compressed_where_they_are(api: Api, codec: str) -> None:
    source, models = {"weight": torch.zeros(10_000)}, [{"weight": torch.ones(10_000)} for _ in range(2)]
    crew = api.crew(2, scheme=api.scheme(compress=codec), sender={"weights": source}, models=models)
    async with crew as (sender, receivers, _):
        for value in (1.0, 2.0, 3.0):
            source["weight"].fill_(value)
            await sender.send_async()
            assert all(torch.equal(model["weight"], source["weight"]) for model in models)
        assert sender.status()[0].bytes_sent < 4 * 4000
        assert [r.bus.dropped for r in receivers] == [{}, {}]


def test_both_belong_to_the_bus_and_travel_with_it_as_all_of_its_configuration(api: Api) -> None:
    configuration = {"num_workers": 2, "min_workers": 1, "checksum": True, "compress": "lz4", "delta": True}
    bus = api.bus("tcp://10.0.0.3:5555", connect="tcp://localhost:5555", allow_plaintext=True, **configuration)
    for copy in (passed_on(bus), passed_on(api.scheme(bus=bus)).bus):
        assert {name: getattr(copy, name) for name in configuration} == configuration
        assert (copy.endpoint, copy.connect_endpoint) == ("tcp://10.0.0.3:5555", "tcp://localhost:5555")
        assert copy.allow_plaintext
    for options in ({"compress": "zstd"}, {"delta": True}):
        with pytest.raises(ValueError, match="Bus"):
            api.scheme(bus=api.bus(), **options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"compress": "gzip"}, ValueError), ({"compress": True}, ValueError), ({"delta": 1}, TypeError)],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    for make in (ZMQWeightSyncScheme, Bus):
        with pytest.raises(kind, match=next(iter(options))):
            make(**options)  # type: ignore[operator]
