"""Arguments: what several entry points take is checked in one place, before anything is begun."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from itertools import dropwhile
from typing import Any, Self, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])

MAX_VERSION = 1 << 62  # the most in a checkpoint: there is room to count on


def check_timeout(timeout: float | None, *, or_none: bool = False) -> None:
    """Raise TypeError or ValueError for what is no time limit in seconds, before anything is begun."""
    if (timeout is None and or_none) or (type(timeout) is float and timeout >= 0):
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        hint = "; only receive() waits without a limit" if timeout is None else ""
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}{hint}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, it is {timeout!r}")


def as_workers(worker_ids: int | Iterable[int] | None) -> list[int] | None:
    """``worker_ids`` as documented: None, one index, or several. Raises TypeError for anything else."""
    if worker_ids is None:
        return None
    chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    if not all(isinstance(w, int) and not isinstance(w, bool) for w in chosen):
        raise TypeError(f"worker_ids must be None, an int or a list of ints, not {worker_ids!r}")
    if not chosen:
        raise ValueError("worker_ids is empty; pass None for everybody")
    return sorted(set(chosen))


def as_version(state: Mapping[str, int]) -> int:
    """The version in the state of a sender."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < MAX_VERSION:
        raise ValueError(f"a sender's state is {{'version': a whole number from 0}}, not {state!r}")
    return version


def check_forward(version: int, now: int) -> None:
    """Refuse to count backwards."""
    if version < now:
        raise ValueError(
            f"this sender is at version {now} already, and versions never go back: version {version} cannot be loaded; "
            "load a checkpoint before the first publication"
        )


def check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least else "an integer from 0"
        raise ValueError(f"{name} must be {kind}, not {value!r}")


def check_bytes(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a number of bytes, not {value!r}")


def check_slots(slots: int) -> None:
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 2:
        raise ValueError(f"slots must be an integer of at least 2 (one is read, one is written), not {slots!r}")


def check_sync(sync: bool, *, is_blocking: bool) -> None:
    """TorchRL's option of some schemes: False has ``send`` wait for no worker."""
    if not sync and not is_blocking:
        raise ValueError("sync=False is for blocking schemes, whose send() then waits for no worker: use publish()")


def check_quorum(num_workers: int | None, min_workers: int) -> None:
    if num_workers is not None and min_workers > num_workers:
        raise ValueError(
            f"min_workers={min_workers} of num_workers={num_workers}: a fixed number of workers is waited for whole; "
            "leave num_workers out where they come and go"
        )


def check_fanout(fanout: bool) -> None:
    if not isinstance(fanout, bool):
        raise ValueError(f"fanout must be True or False, not {fanout!r} (fanout=True does what 'push' did)")


def check_processes(processes: Iterable[Any]) -> tuple[Any, ...]:
    """Raise TypeError, which names what is understood, for what is no process, before anything is begun."""
    if not isinstance(processes, Iterable):
        raise TypeError(f"processes= takes a list: [{processes!r}]")
    found = tuple(processes)
    for process in found:
        if not any(hasattr(process, name) for name in ("exitcode", "poll", "returncode")):
            raise TypeError(
                "processes= takes processes of multiprocessing, subprocess and asyncio.create_subprocess_exec, "
                f"not {process!r}"
            )
    return found


def refuse_unknown(called: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError, in the name of what was called, if one of the keywords that were ``given`` is not known."""
    if unknown := set(given) - set(known):
        name = min(unknown)
        meant = get_close_matches(name, known, 1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"there are {', '.join(sorted(known))}"
        raise TypeError(f"{called}(): got an unexpected keyword argument {name!r}; {hint}")


def refuse_misspelt(called: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if one of the keywords that were ``given``, any of which may be meant, looks much like another
    that is known."""
    for name in given:
        if meant := get_close_matches(name, known, 1, 0.75):
            raise TypeError(f"{called}() has no argument {name!r}; did you mean {meant[0]!r}?")


def checked(method: Method) -> Method:
    """A scheme's method that refuses wrong arguments in the name of the scheme's class, and tells how to give them. A
    keyword that it passes on to the method of a base is one of its own."""
    own, name = signature(method), getattr(method, "__name__", "")
    limit = sum(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in own.parameters.values()) - 1

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        called = f"{type(self).__name__}.{name}"
        bases = dropwhile(lambda base: base.__dict__.get(name) is not call, type(self).__mro__)
        if (known := _keywords(bases, name)) is not None:
            refuse_unknown(called, kwargs, known)
        if len(args) > limit:
            first = "" if limit else f"model_id={args[0]!r}, " if isinstance(args[0], str) else "model_id=…, "
            few = f"only {limit} arguments without their names" if limit else "keywords only"
            raise TypeError(f"{called}() takes {few}: {name}({first}model=…)")
        try:
            own.bind(self, *args, **kwargs)
        except TypeError as error:  # Python's own would name the class that defines the method
            raise TypeError(f"{called}(): {error}") from None
        return method(self, *args, **kwargs)

    return cast("Method", call)


class KnownKeywords:
    """A base of classes whose ``__init__`` is a base's with another name: a keyword that none of them has is refused in
    the name of the class that was called. Not of a class with an ``__init__`` of a user's, which may take any."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if kwargs and (known := _keywords(cls.__mro__, "__init__")) is not None:
            refuse_unknown(cls.__name__, kwargs, known)
        return super().__new__(cls)


def _keywords(bases: Iterable[type], name: str) -> set[str] | None:
    """Of this method of the first, and of that of each further one that gets what it passes on; None: any, or a user's
    takes part."""
    known: set[str] = set()
    for base in bases:
        if name in base.__dict__ and base is not object:
            if base.__module__.partition(".")[0] != __name__.partition(".")[0]:
                return None
            parameters = signature(base.__dict__[name]).parameters.values()
            known.update(p.name for p in parameters if p.kind in (Parameter.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
            if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
                return known - {"self"}
    return None
