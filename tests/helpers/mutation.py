"""Breaking the code on purpose, to see the tests bark.

    mutate(monkeypatch, Worker, "_stage", "if version > ahead:", "if True:")

replaces a piece of a function's source and puts the result in the function's place, until the test ends.
"""

import inspect
import sys
import textwrap

import pytest


def mutate(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Replace the one occurrence of ``old`` in the source of a method or property."""
    raw = inspect.getattr_static(owner, name)
    function = raw.fget if isinstance(raw, property) else raw
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{owner.__name__}.{name} has {source.count(old)} times {old!r}: adapt the mutation"
    globals_ = vars(sys.modules[function.__module__])
    scope: dict[str, object] = {}
    # The module's own globals, so that what it imports and what tests patch there is seen.
    exec(
        compile("from __future__ import annotations\n" + source.replace(old, new), f"<mutated {name}>", "exec"),
        globals_,
        scope,
    )
    monkeypatch.setattr(owner, name, scope[name])
