"""Checks of arguments that several entry points take, and the declaration of constructors' options. Each check runs
before the call changes anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, cleandoc, formatannotation, signature
from textwrap import TextWrapper
from typing import Annotated, Any, Required, TypeVar, cast, get_args, get_origin, get_type_hints

Method = TypeVar("Method", bound=Callable[..., Any])
Typed = TypeVar("Typed", bound=type)


def check_timeout(timeout: float | None, *, or_none: bool = False) -> None:
    """Raise TypeError or ValueError unless ``timeout`` is a number of seconds from 0, or None where that is allowed."""
    if (timeout is None and or_none) or (type(timeout) is float and timeout >= 0):
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        hint = "; only receive() waits without a limit" if timeout is None else ""
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}{hint}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, it is {timeout!r}")


def as_workers(worker_ids: int | Iterable[int] | None) -> list[int] | None:
    """A public method's ``worker_ids`` as a sorted list; None: all workers. Raises TypeError unless it is None, an int
    or several ints; ValueError if it is empty."""
    if worker_ids is None:
        return None
    chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    if not all(isinstance(w, int) and not isinstance(w, bool) for w in chosen):
        raise TypeError(f"worker_ids must be None, an int or a list of ints, not {worker_ids!r}")
    if not chosen:
        raise ValueError("worker_ids is empty; pass None for all workers")
    return sorted(set(chosen))


def check_count(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer from {least}"
        raise ValueError(f"{name} must be {kind}, not {value!r}")


def check_quorum(num_workers: int | None, min_workers: int) -> None:
    if num_workers is not None and min_workers > num_workers:
        raise ValueError(
            f"min_workers={min_workers} is more than num_workers={num_workers}: a sender with a fixed number of "
            "workers waits for all of them; leave num_workers out if workers come and go"
        )


def check_fanout(name: str, fanout: bool) -> None:
    if not isinstance(fanout, bool):
        raise ValueError(f"{name} must be True or False, not {fanout!r} ({name}=True does what 'push' did)")


def check_processes(processes: Iterable[Any]) -> tuple[Any, ...]:
    """``processes`` as a tuple. Raises TypeError, which names the accepted kinds, if one of them is no process."""
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


def user_stacklevel() -> int:
    """The ``stacklevel`` with which a warning of the caller points at the first frame outside this package."""
    level, frame = 0, sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("asyncsync."):
        level, frame = level + 1, frame.f_back
    return level + 2


def refuse_misspelt(called: str, given: Iterable[str], known: Iterable[str], similarity: float = 0.75) -> None:
    """Raise TypeError if a keyword in ``given`` is probably a misspelt one of ``known``. For the function named
    ``called``, which accepts any keyword. From this ``similarity`` on (0 to 1), a keyword counts as misspelt."""
    for name in given:
        if meant := get_close_matches(name, known, 1, similarity):
            raise TypeError(f"{called}() has no argument {name!r}; did you mean {meant[0]!r}?")


def check_call(called: str, shown: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if arguments (``self`` first) do not fit the signature of the method named ``called``. Python's
    own error would name the class that defines the method, and no remedy."""
    parameters = shown.parameters.values()
    by_position = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    known = shown.parameters.keys() - {"self"}
    accepts_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    if not accepts_any and (unknown := kwargs.keys() - known):
        name = min(unknown)
        similar = get_close_matches(name, known, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(sorted(known))}"
        raise TypeError(f"{called}(): got an unexpected keyword argument {name!r}; {hint}")
    if len(args) > len(by_position):
        surplus, positional = args[len(by_position)], ", ".join(by_position[1:])
        # A surplus string is probably a model_id, anything else a model.
        meant = f"model_id={surplus!r}" if isinstance(surplus, str) and "model_id" not in by_position else "model=…"
        hint = meant if meant.partition("=")[0] in shown.parameters else "name the others"
        rule = f"only {positional} may be given without its name" if positional else "it takes keywords only"
        raise TypeError(f"{called}(): {rule}; {hint}")
    try:
        shown.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{called}(): {error}") from None


def checked(base: Callable[..., Any] | None = None) -> Callable[[Method], Method]:
    """Decorate a scheme's method: a TypeError about its arguments names the scheme's class.

    ``base``: the method that the decorated one overrides and passes its ``**options`` to. The signature then shows the
    base's parameters, too, and the check covers them; the base's docstring serves a method that has none.
    """

    def decorate(method: Method) -> Method:
        shown, name = signature(method), getattr(method, "__name__", "")
        if base is not None:
            own = [p for p in shown.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
            inherited = [p for p in signature(base).parameters.values() if p.name not in shown.parameters]
            shown = shown.replace(parameters=[*own, *inherited])

        @wraps(method)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            check_call(f"{type(self).__name__}.{name}", shown, (self, *args), kwargs)
            return method(self, *args, **kwargs)

        call.__signature__ = shown  # type: ignore[attr-defined]
        call.__doc__ = method.__doc__ or base.__doc__
        return cast("Method", call)

    return decorate


@dataclass(frozen=True)
class Option:
    """Declares one argument of a constructor, as metadata of its type: ``Annotated[int, Option(…)]``.

    Attributes:
        default: the default of a keyword; a positional argument has its default in the signature. ``Parameter.empty``:
            the caller must give this keyword.
        check: called with the name and the value, unless the value is the default; raises ValueError or TypeError.
        doc: one line of documentation. The docstring of a TypedDict may document its fields instead.
    """

    default: Any = None
    check: Callable[[str, Any], object] | None = None
    doc: str = ""


def described(typed: Typed) -> Typed:
    """Decorate a TypedDict that declares options: attach to each field an :class:`Option` with its documentation.

    The docstring documents fields, also inherited ones, in one paragraph ``name: …`` each under ``Args:``. A field
    whose type has no Option has the default None, or must be given if it is ``Required``.
    """
    _, _, page = cleandoc(typed.__doc__ or "").partition("Args:\n")
    docs = {name: " ".join(doc.split()) for name, doc in re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", page, re.MULTILINE)}
    hints = get_type_hints(typed, include_extras=True)
    for name, plain in hints.items():  # not only documented fields: ``python -OO`` strips docstrings
        option = Option()
        if get_origin(plain) is Annotated:
            plain, option = get_args(plain)
        elif get_origin(plain) is Required:
            (plain,), option = get_args(plain), Option(Parameter.empty)
        hints[name] = Annotated[plain, replace(option, doc=docs.get(name) or option.doc)]
    typed.__annotations__ = hints
    return typed


def options_of(typed: type) -> dict[str, Option]:
    """The options of a TypedDict that, or whose bases, :func:`described` decorates."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(typed, include_extras=True).items()}


def defaults_of(typed: type) -> dict[str, Any]:
    """The defaults of these options, without those that the caller must give."""
    options = options_of(typed).items()
    return {name: option.default for name, option in options if option.default is not Parameter.empty}


def declared(init: Method) -> Method:
    """Decorate an ``__init__(self, …, **options: Unpack[X])``, where ``X`` is a TypedDict for :func:`options_of`.

    The method gets all options of ``X``: checked, and with the default where the caller gave none. A TypeError about
    arguments names the class that the caller instantiated. The signature shows each option as a keyword. The docstring
    documents each option, after what stands under its own ``Args:``.
    """
    own, hints = signature(init), get_type_hints(init, include_extras=True)
    typed = get_args(hints.pop("options"))[0]
    options, hints = options_of(typed), hints | get_type_hints(typed, include_extras=True)
    defaults = defaults_of(typed)
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=option.default) for name, option in options.items()]
    first = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    shown = own.replace(parameters=[p.replace(annotation=_as_text(hints.get(p.name))) for p in [*first, *keywords]])

    @wraps(init)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> None:
        check_call(type(self).__name__, shown, (self, *args), kwargs)
        for name, option in options.items():
            if option.check and kwargs.get(name, option.default) is not option.default:
                option.check(name, kwargs[name])
        init(self, *args, **defaults | kwargs)

    del call.__wrapped__  # documentation tools would show it instead
    call.__annotations__ = hints
    call.__signature__ = shown  # type: ignore[attr-defined]
    docs = {name: hint.__metadata__[0].doc for name, hint in hints.items() if get_origin(hint) is Annotated}
    wrap = TextWrapper(112, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)
    about, raises, errors = cleandoc(init.__doc__ or "").partition("Raises:")
    about, _, page = about.rstrip().partition("Args:\n")
    pages = [page] * bool(page) + [wrap.fill(f"{name}: {doc}") for name, doc in docs.items()]
    call.__doc__ = "\n".join([about.rstrip(), "", "Args:", *pages, "", raises + errors]).strip()
    return cast("Method", call)


def _as_text(hint: Any) -> Any:
    """A type as the signature shows it: as text, without module names and metadata."""
    if hint is None:
        return Parameter.empty
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", formatannotation(plain))
