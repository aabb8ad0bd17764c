"""Models whose calls end before their work does: the gate cannot see that work, so they are refused, or warned of."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from torch import nn

from helpers.apis import Api


class Coroutine(nn.Linear):
    async def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x)


class Generator(nn.Linear):
    def forward(self, x: Any) -> Iterator[Any]:  # type: ignore[override]
        yield super().forward(x)


class AsyncGenerator(nn.Linear):
    async def forward(self, x: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield super().forward(x)


class Callee:
    async def __call__(self, x: Any) -> Any:
        return x


def replaced(forward: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.forward = forward
    return model


LATE: dict[str, Callable[[], nn.Module]] = {
    "a coroutine": lambda: Coroutine(1, 1),
    "a generator": lambda: Generator(1, 1),
    "an asynchronous generator": lambda: AsyncGenerator(1, 1),
    "an attribute": lambda: replaced(functools.partial(Coroutine(1, 1).forward)),
    "an object": lambda: replaced(Callee()),
}


@pytest.mark.requirement(238)
@pytest.mark.parametrize("kind", LATE)
def test_a_forward_that_ends_before_its_work_is_refused_unless_the_user_keeps_updates_out(api: Api, kind: str) -> None:
    model = LATE[kind]()
    scheme = api.scheme()
    match = r"forward returns before its work is done.*scheme\.hold\(\).*apply=\"on_receive\""
    with pytest.raises(ValueError, match=match):
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
    assert not model._forward_hooks
    for options in ({"gate": "hold"}, {"apply": "on_receive"}):
        api.scheme().init_on_receiver("policy", model=model, worker_idx=0, **options)


class Hidden(Coroutine):
    """Ordinary methods that return what is to be awaited."""

    later = Coroutine.forward

    def forward(self, x: Any) -> Any:
        return self.later(x)

    def act(self, x: Any) -> Any:
        return self.later(x)


@pytest.mark.requirement(238)
async def test_a_call_that_turns_out_to_end_early_is_warned_of(api: Api) -> None:
    model = Hidden(1, 1)
    async with api.crew(1, source=nn.Linear(1, 1), models=[model], receiver={"gated": ("act",)}) as everybody:
        for call, name in ((model, "Hidden"), (model.act, "Hidden.act")):
            with pytest.warns(UserWarning, match=rf"a call of {name} has returned a coroutine.*scheme\.hold\(\)"):
                unfinished = call(model.weight)
            await unfinished
        await everybody.sender.send_async(timeout=10)
