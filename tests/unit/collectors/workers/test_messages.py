"""Messages of collectors: whole or not at all, however large, and nobody waits for room but who says so."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors.workers import messages
from asyncsync.collectors.workers.messages import MAX_PACKET, Channel, Parcel, Stopped, encode, loads
from asyncsync.errors import AckTimeout
from helpers.memory import descriptors

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = map(Channel, Channel.pair())
    yield here, there
    here.close()
    there.close()


def put(here: Channel, message: Any) -> None:
    assert here.offer(encode(message))


def in_memory_file(tensor: torch.Tensor) -> bool:
    """Whether its memory is a mapping of what was sent."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return "asyncsync" in rest
    return False


@pytest.mark.parametrize("size", [0, 1, MAX_PACKET - 500, MAX_PACKET, 3_000_000])
def test_messages_of_any_size_come_whole_and_in_order(pair: Pair, size: int) -> None:
    here, there = pair
    before = descriptors()
    assert there.receive(wait=False) is None
    put(here, ("first", b"x" * size))
    put(here, ("second", [1, 2]))
    assert there.receive(wait=False) == ("first", b"x" * size)
    assert there.receive(wait=False) == ("second", [1, 2])
    assert there.receive(wait=False) is None
    assert descriptors() == before


def test_what_was_sent_before_an_end_that_left_something_unread_is_read(pair: Pair) -> None:
    """The system reports such an end first, and once."""
    here, there = pair
    put(here, ("page", 1))
    put(there, ("failed", "why"))
    there.close()
    assert here.receive(wait=False) == ("failed", "why")
    with pytest.raises(Stopped):
        here.receive(wait=False)


@pytest.mark.parametrize("numel", [5, 100_000])
def test_tensors_are_views_of_what_has_come(pair: Pair, numel: int) -> None:
    here, there = pair
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
    given = TensorDict({str(dtype): torch.ones(2, numel).to(dtype) for dtype in dtypes}, [2])
    given["empty"], given["scalars"] = torch.empty(2, 0), torch.arange(2)
    given["strided"] = torch.arange(2 * numel).view(numel, 2).t()
    before = descriptors()
    put(here, ("batch", 7, Parcel.of(given)))
    kind, number, parcel = there.receive(wait=False)
    batch = loads(parcel)
    assert (kind, number) == ("batch", 7)
    assert descriptors() == before
    assert batch.batch_size == given.batch_size
    for key, tensor in given.items():
        assert batch[key].dtype == tensor.dtype
        assert torch.equal(batch[key], tensor)
    assert in_memory_file(batch["torch.float32"]) == (numel > 1000)
    batch["torch.float32"].zero_()  # the receiver's own
    assert given["torch.float32"].all()
    assert batch["torch.bool"].all()


def test_what_is_no_plain_tensor_keeps_its_nature(pair: Pair) -> None:
    here, there = pair
    weight = torch.nn.Parameter(torch.ones(3))
    leaf = torch.ones(3, requires_grad=True)
    given = [weight, leaf, torch.ones(3, dtype=torch.complex64).conj(), lambda: 5]
    put(here, Parcel.of(given))
    parameter, found, conjugate, function = loads(there.receive(wait=False))
    assert isinstance(parameter, torch.nn.Parameter)
    assert found.requires_grad
    assert conjugate.is_conj()
    assert function() == 5


def test_nobody_waits_for_room_but_who_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    packet = encode(b"x" * 20_000)
    sent = 0
    while here.offer(packet):
        sent += 1
        assert sent < 1000
    monkeypatch.setattr(messages, "SEND_SECONDS", 0.1)
    with pytest.raises(AckTimeout, match=r"has read no messages for 0\.1 s"):
        here.send(b"x" * 20_000)
    assert there.receive(wait=False) == b"x" * 20_000
    here.send("last")
    assert [there.receive(wait=False) for _ in range(sent + 1)] == [b"x" * 20_000] * (sent - 1) + [("last",), None]


def test_the_others_end(pair: Pair) -> None:
    here, there = pair
    put(here, "last")
    here.close()
    assert there.receive(wait=False) == "last"
    with pytest.raises(Stopped):
        there.receive(wait=False)
    with pytest.raises(OSError, match="Broken pipe"):
        there.offer(encode("nobody"))


def test_a_waiting_thread_is_woken_by_shutdown(pair: Pair) -> None:
    _, there = pair
    timer = threading.Timer(0.1, there.shutdown)
    timer.start()
    with pytest.raises(Stopped):
        there.receive()
    timer.join()
    there.shutdown()
