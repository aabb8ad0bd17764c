"""Options are declared once: signature, docstring, defaults and refusals follow from the declaration."""

import inspect
from types import ModuleType
from typing import Annotated, Any, Required, TypedDict, Unpack

import pytest

import asyncsync
import asyncsync.sync
from asyncsync.arguments import Option, check_count, declared, described
from asyncsync.bus.core import BusOptions

NAMES = [name for name in asyncsync.__all__ if name.endswith("Scheme")] + ["Bus"]


@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_each_keyword_of_a_constructor_is_shown_with_its_default_and_documented(module: ModuleType, name: str) -> None:
    kind = getattr(module, name)
    shown = inspect.signature(kind).parameters
    assert not [p for p in shown.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    described = {line.partition(":")[0].strip() for line in inspect.getdoc(kind.__init__).splitlines()}  # type: ignore[union-attr]
    assert shown.keys() <= described
    assert {"num_workers", "min_workers"} <= shown.keys()
    assert (shown["min_workers"].default, shown["num_workers"].annotation) == (1, "int | None")


def test_a_bus_takes_what_is_declared() -> None:
    assert set(inspect.signature(asyncsync.Bus).parameters) == {"endpoint", *BusOptions.__annotations__}


class Few(TypedDict, total=False):
    size: Annotated[int, Option(2, check_count, "how many.")]
    name: Annotated[str | None, Option(doc="what it is called.")]


class Thing:
    @declared
    def __init__(self, where: str = "here", **options: Unpack[Few]) -> None:
        """A thing.

        Raises:
            ValueError: a bad size.
        """
        self.given: dict[str, Any] = {"where": where, **options}


class Derived(Thing):
    def __init__(self, **options: Any) -> None:
        super().__init__("there", **options)


def test_what_is_declared_is_filled_in_checked_and_shown() -> None:
    assert Thing(size=3).given == {"where": "here", "size": 3, "name": None}
    assert Derived().given == {"where": "there", "size": 2, "name": None}
    with pytest.raises(TypeError, match="only where may be given without its name"):
        Thing("here", 3)
    assert str(inspect.signature(Thing)).replace("'", "") == (
        "(where: str = here, *, size: int = 2, name: str | None = None) -> None"
    )
    assert Thing.__init__.__doc__ == (
        "A thing.\n\nArgs:\n    size: how many.\n    name: what it is called.\n\nRaises:\n    ValueError: a bad size."
    )
    with pytest.raises(ValueError, match="size must be a positive integer, not 0"):
        Thing(size=0)
    for kind in (Thing, Derived):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\).*'sise'.*'size'"):
            kind(sise=3)  # type: ignore[call-arg]


@described
class More(Few, total=False):
    """Few and one more.

    Args:
        size: how many
            there are.
        must: be given.
    """

    must: Required[str]


class Other:
    @declared
    def __init__(self, first: int, **options: Unpack[More]) -> None:
        """Another.

        Args:
            first: of all.
        """
        self.given = options


def test_a_docstring_documents_options_and_an_option_may_have_to_be_given() -> None:
    assert Other(1, must="").given == {"size": 2, "name": None, "must": ""}
    args = "    first: of all.\n    size: how many there are.\n    name: what it is called.\n    must: be given."
    assert Other.__init__.__doc__ == f"Another.\n\nArgs:\n{args}"
    assert inspect.signature(Other).parameters["must"].default is inspect.Parameter.empty
    for given, name in (({"must": ""}, "first"), ({"first": 1}, "must")):
        with pytest.raises(TypeError, match=rf"^Other\(\): missing a required argument: '{name}'"):
            Other(**given)
