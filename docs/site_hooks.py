"""What MkDocs does not do by itself when `make docs` builds the site; mkdocs.yml names this file as its hook.

- README.md is the first page. What else a page links to in the repository, such as an example, becomes a page, too.
- Docstrings are written for `help()`: the marks of Sphinx's roles are taken off, and a double colon becomes one.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def uri(path: Path) -> str:
    """Where a file or folder of the repository is in the site's sources."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{name}/index.md" if path.is_dir() else name.removesuffix(".py") + ".md" * (path.suffix == ".py")


def on_config(config: MkDocsConfig) -> None:
    """List the decisions, which are many short pages, last."""
    pages = sorted(uri(path) for path in (DOCS / "decisions").glob("[0-9]*.md"))
    config.nav = [*(config.nav or []), {"Decisions": ["decisions/index.md", *pages]}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add README.md, and what the pages link to outside of docs/."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    linked = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())}
    linked |= {program for path in linked if path.is_dir() for program in path.glob("*.py")}
    for path in sorted({pages[0], *linked}):
        if path.exists() and not path.is_relative_to(DOCS):
            files.append(File.generated(config, uri(path), content=content(path)))


def content(path: Path) -> str | bytes:
    if path.is_dir():
        return "\n".join([f"# {path.name}\n", *(f"- [{each.name}]({each.name})" for each in sorted(path.glob("*.py")))])
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    return path.read_bytes() if path.suffix == ".png" else path.read_text()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links into the repository become links into the site."""
    here = page.file.src_uri
    source = ROOT if here == "index.md" else DOCS if (DOCS / here).exists() else ROOT
    folder = source / os.path.dirname(here)

    def moved(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        return os.path.relpath(uri(path), os.path.dirname(here) or ".") if path.exists() else link[1]

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("api/"):
        html = re.sub(r":\w+:<code>~?", "<code>", html).replace("::</p>", ":</p>")
    return html


class Attributes(griffe.Extension):
    """A class attribute without words of its own is left out: `help(True)` is not about it. A method without words of
    its own has those of the method that it overrides."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        words = attr.docstring.value.strip() if isinstance(node, griffe.ObjectNode) and attr.docstring else None
        if words is not None and words == inspect.getdoc(type(node.obj)):
            attr.docstring = None

    def on_function_instance(self, *, node: Any, func: griffe.Function, agent: Any, **others: Any) -> None:
        if func.docstring is None and (text := inspect.getdoc(node.obj)):
            options = agent.docstring_options
            func.docstring = griffe.Docstring(text, parent=func, parser=agent.docstring_parser, parser_options=options)
