"""Exceptions that strike this thread at any moment, as Ctrl-C and signal handlers do."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

# Destructors and weak references' callbacks: what strikes there the interpreter reports, and goes on.
IGNORED = ("__del__", "_remove")


class Strike(BaseException):
    """What a signal handler raises."""


def strike_everywhere(
    modules: list[ModuleType], call: Callable[[], Any], deed: Callable[[], None], *, most: int = 2000
) -> Iterator[tuple[int, Any, BaseException | None]]:
    """Do a deed in this thread where a signal's handler may run: 0, 1, 2, … in these modules, during a call.

    The interpreter runs handlers when a Python function is entered and when a C function has returned, which is when a
    profiler is called. (Between two lines it does not: between a `with` block's body and its end, for one.)

    Yields after each call: which place, what it returned, what it raised. Ends with the first call that is over before
    its turn.
    """
    files = {module.__file__ for module in modules}

    for k in range(most):
        left = k
        hit = False

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal left, hit
            here: FrameType | None = frame
            if event == "call" and frame.f_code.co_filename not in files:
                here = frame.f_back
            if frame.f_code.co_name in IGNORED:
                return
            if hit or event not in ("call", "c_return") or here is None or here.f_code.co_filename not in files:
                return
            left -= 1
            if left < 0:
                hit = True
                sys.setprofile(None)
                deed()

        result: Any = None
        raised: BaseException | None = None
        sys.setprofile(profile)
        try:
            result = call()
        except BaseException as error:
            raised = error
        finally:
            sys.setprofile(None)
        yield k, result, raised
        if not hit:
            return
    raise AssertionError("it never ends")


@contextlib.contextmanager
def sigint_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a test run that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(call: Callable[[], Any], delay: float) -> tuple[Any, float]:
    """Make a call, with a SIGINT to this thread after so many seconds: what the call has returned, if that was faster,
    and how long after the interrupt it has ended (seconds)."""
    result = None
    timer = threading.Timer(delay, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    begin = time.monotonic()
    try:
        timer.start()
        result = call()
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        took = time.monotonic() - begin - delay
    timer.join()
    return result, took


@contextlib.contextmanager
def sigint_elsewhere(after: float = 0.2) -> Iterator[None]:
    """SIGINT is delivered to another thread in the midst of the block, as the kernel may: no system call of this one
    ends. (Nor does it if the signal comes just before the call.) The block must end by KeyboardInterrupt, and soon."""

    def strike() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    timer = threading.Timer(after, strike)
    took = None
    with sigint_raises():
        begin = time.monotonic()
        timer.start()
        try:
            yield
        except KeyboardInterrupt:
            took = time.monotonic() - begin - after
        finally:
            # Whatever has come of it, it strikes nobody else.
            timer.cancel()
            with contextlib.suppress(KeyboardInterrupt):
                timer.join()
    assert took is not None, "it has not waited"
    assert took < 1.0, took  # the bound is SIGNAL_CHECK_SECONDS
