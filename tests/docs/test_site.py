"""`make docs` builds the site without a warning, and the site loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import asyncsync
import asyncsync.collectors
import asyncsync.sync

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[2]))  # `make test` runs a copy of the tests

# Building imports and renders every public class: once for all tests.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300), pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    package = Path(asyncsync.__file__).parent
    if not (package / "collectors").exists():  # a checkout: lay it out as it is installed
        (folder / "asyncsync").mkdir()
        for path in [*package.iterdir(), SOURCE / "collectors", SOURCE / "transports"]:
            (folder / "asyncsync" / path.name).symlink_to(path)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", folder / "site"],
        cwd=SOURCE,
        env=os.environ | {"PYTHONPATH": str(folder), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "site"


class Loaded(HTMLParser):
    """What a browser loads by itself when it shows a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "a" and not (tag == "link" and given.get("rel") == "canonical"):
            self.addresses += [value for name in ("href", "src", "data") if (value := given.get(name))]


def test_every_public_name_is_on_a_page(site: Path) -> None:
    for module, page in ((asyncsync, "asyncsync"), (asyncsync.sync, "sync"), (asyncsync.collectors, "collectors")):
        text = (site / f"api/{page}.html").read_text()
        public = [
            each for each in module.__all__ if getattr(getattr(module, each), "__module__", "").startswith("async")
        ]
        assert [each for each in public if not re.search(rf'id="[\w.]+\.{each}"', text)] == []
        assert "Unpack" not in text, "the options of constructors are written out"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 15
    elsewhere = {
        address for page in pages for address in Loaded(page.read_text()).addresses if re.match(r"(\w+:)?//", address)
    }
    assert elsewhere == set()
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet.name
