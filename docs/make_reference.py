"""Writes docs/reference.md from the docstrings of everything public. Run me: python docs/make_reference.py

Public are the names in __all__ of asyncsync, asyncsync.sync and asyncsync.collectors. A class comes with its methods
and properties, but for those that another public class of the same module above it has, with the same words.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference.md")
MODULES = {
    "asyncsync": "Schemes whose methods are coroutines on the caller's event loop.",
    "asyncsync.sync": "The same schemes with blocking methods, as TorchRL documents them.",
    "asyncsync.collectors": "Environments stepped in this process or in worker processes, by the newest policy.",
}
HEAD = """# Reference

Every public class and function, from its docstring; `python docs/make_reference.py` writes this page.
[lifecycle.md](lifecycle.md) tells what a scheme does when, [guarantees.md](guarantees.md) what is promised.
"""
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
WIDTH = 100


class Bare(str):
    """Text that a signature shows without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def page() -> str:
    """The whole page."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    lines = [HEAD, *(f"- [`{name}`](#{name.replace('.', '')}): {purpose}" for name, purpose in MODULES.items())]
    printed: dict[int, str] = {}
    for module, loaded in modules.items():
        lines += ["", f"## {module}", "", MODULES[module]]
        values = {name: getattr(loaded, name) for name in sorted(loaded.__all__)}
        for name, value in values.items():
            if not str(getattr(value, "__module__", "")).startswith("asyncsync"):
                continue  # a version string, or a class of another library
            full = f"{module}.{name}"
            lines += ["", f"### {full}", ""]
            if id(value) in printed:
                lines.append(f"The same as `{printed[id(value)]}`.")
                continue
            printed[id(value)] = full
            lines += described(name, value, [each for each in values.values() if inspect.isclass(each)])
    return "\n".join(lines) + "\n"


def described(name: str, value: Any, public: list[type]) -> Iterator[str]:
    """What is printed of a class or a function."""
    if not inspect.isclass(value):
        yield from block(signature(f"def {name}", value), value.__doc__)
        return
    if bases := list(shown_bases(value, public)):
        yield f"A subclass of {' and '.join(f'`{base.__name__}`' for base in bases)}."
        yield ""
    plain = issubclass(value, Exception) and "__init__" not in vars(value)
    yield from block(f"class {name}" if plain else signature(f"class {name}", value), documentation(value, public))
    for method, member in members(value, [each for each in public if each is not value and issubclass(value, each)]):
        yield from ["", f"#### {name}.{method}", ""]
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        doc = inspect.getdoc(getattr(value, method))
        if isinstance(member, property):
            # An attribute of a part has no annotation.
            kind = getattr(member.fget, "__annotations__", {}).get("return")
            yield from block(f"{method}{f': {kind}' if kind else ''}  # property", doc)
        else:
            kind = "async def" if inspect.iscoroutinefunction(function) else "def"
            before = "@classmethod\n" if isinstance(member, classmethod) else ""
            yield from block(before + signature(f"{kind} {method}", function), doc)


def documentation(value: type, public: list[type]) -> str:
    """A class's docstring, and the one that describes the constructor's arguments: the constructor's own, or that of a
    private class above this one."""
    own = inspect.cleandoc(vars(value).get("__doc__") or "")
    constructor = next(each for each in value.__mro__ if "__init__" in vars(each))
    if "Args:" in own or constructor in public or not constructor.__module__.startswith("asyncsync"):
        return own
    return f"{own}\n\n{inspect.cleandoc(constructor.__init__.__doc__ or constructor.__doc__ or '')}".strip()


def shown_bases(value: type, public: list[type]) -> Iterator[type]:
    """The nearest classes above one that are public, or Python's own."""
    for base in value.__bases__:
        if base in public or (base.__module__ == "builtins" and base is not object):
            yield base
        else:
            yield from shown_bases(base, public)


def members(value: type, above: list[type]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of their definition, without those of public classes above."""
    seen: set[str] = set()
    for cls in value.__mro__:
        if not cls.__module__.startswith("asyncsync"):
            continue
        for name in vars(cls):
            member = inspect.getattr_static(value, name)
            if name.startswith("_") or name in seen or not isinstance(member, property | classmethod | Callable):  # type: ignore[arg-type]
                continue
            seen.add(name)
            if not any(same(member, inspect.getattr_static(each, name, None)) for each in above):
                yield name, member


def same(member: Any, other: Any) -> bool:
    """Whether the page would print the same of both."""
    if not (inspect.isfunction(member) and inspect.isfunction(other)):
        return member is other
    return other.__doc__ == (member.__doc__ or other.__doc__) and inspect.signature(member) == inspect.signature(other)


def signature(name: str, value: Any) -> str:
    """On one line, or with one parameter to a line."""
    found = inspect.signature(value)
    result = found.return_annotation
    parameters = [
        each.replace(annotation=Bare(each.annotation), default=bare(each.default))
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]
    end = "" if result is inspect.Signature.empty else f" -> {result}"
    line = f"{name}{inspect.Signature(parameters)}{end}"
    if len(line) <= WIDTH or not parameters:
        return line
    inner, kinds = [], [each.kind for each in parameters]
    for number, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and not {each.KEYWORD_ONLY, each.VAR_POSITIONAL} & set(kinds[:number]):
            inner.append("    *,")
        inner.append(f"    {each},")
    return "\n".join([f"{name}(", *inner, f"){end}"])


def bare(value: Any) -> Any:
    """A default as one writes it."""
    if isinstance(value, enum.Enum):
        return Bare(f"{type(value).__name__}.{value.name}")
    if inspect.isroutine(value):
        return Bare(value.__name__)
    return value


def block(code: str, doc: str | None) -> Iterator[str]:
    yield from ["```python", code, "```"]
    if doc:
        yield ""
        yield from markdown(inspect.cleandoc(doc))


def markdown(doc: str) -> Iterator[str]:
    """A docstring in Google's style: sections become lists, what follows ``::`` becomes a block of code."""
    section, fenced = "", False
    for line in re.sub(r"::\n\n((?: {4}.*(?:\n|$)|\n)+)", fence, doc).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if fenced or line.startswith("```"):
            yield line
        elif line in SECTIONS:
            section = line
            yield from [f"**{line.removesuffix(':')}**", ""]
        elif section and line.startswith("    "):
            entry = re.match(r" {4}([^ :][^:]*): (.*)", line) if section not in ("Returns:", "Yields:") else None
            text = line.strip() if entry is None else f"- *{entry[1].strip('*')}*: {entry[2]}"
            yield ("  " if section not in ("Returns:", "Yields:") and entry is None else "") + inline(text)
        else:
            section = section if not line else ""
            yield inline(line)


def fence(found: re.Match[str]) -> str:
    return ":\n\n```python\n" + textwrap.dedent(found[1]).strip() + "\n```\n\n"


def inline(text: str) -> str:
    """Without the marks of Sphinx."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda found: f"``{found[1]}``", text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(page())
