"""What a bus serves for Prometheus, as a scrape finds it."""

import asyncio
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def families(address: tuple[str, int]) -> list[Any]:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=10) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def scrape(address: tuple[str, int]) -> Figures:
    return {(s.name, frozenset(s.labels.items())): s.value for family in families(address) for s in family.samples}


async def look(scheme: Any) -> Figures:
    return await asyncio.to_thread(scrape, scheme.bus.metrics_address)


def of(figures: Figures, name: str, **labels: str) -> float:
    return figures[f"asyncsync_{name}", frozenset(labels.items())]
