"""WorkThread: what a function raises in the thread reaches whoever awaits it."""

from __future__ import annotations

import pytest

from asyncsync.runtime.threads import WorkThread


@pytest.mark.parametrize("error", [StopIteration("over"), StopAsyncIteration("over"), ZeroDivisionError("no")])
async def test_what_is_raised_reaches_the_awaiting_coroutine(error: Exception) -> None:
    """Also a StopIteration, which no future takes: it comes as a RuntimeError."""

    def fail() -> None:
        raise error

    thread = WorkThread("a test's")
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind, match=r"over|no"):
        await thread.submit(fail)
    await thread.close()
