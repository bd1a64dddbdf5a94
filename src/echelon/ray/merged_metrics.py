"""The metrics of all replicas on one page, told apart by a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(texts: Mapping[str, str]) -> bytes:
    """One page of Prometheus' text format of several, by name: every sample has that of its page as the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found.samples += [sample._replace(labels={**sample.labels, LABEL: name}) for sample in family.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry)
