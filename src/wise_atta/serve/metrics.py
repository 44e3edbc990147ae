"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wise_atta.serve.ledger import Question, count_by
from wise_atta.serve.service import Service, Tally
from wise_atta.serve.state import wilson

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _Streams(Collector):
    """Reads the streams at the moment of scraping, so that nothing is counted twice."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        streams = self.service.streams
        for item in fields(Tally):
            metric = CounterMetricFamily(f"wise_atta_{item.name}", f"{item.name} since the start", labels=["stream"])
            for name, stream in streams.items():
                metric.add_metric([name], getattr(stream.tally, item.name))
            yield metric
        gauges = {
            "spent": ("labels asked for", lambda s: s.state.spent),
            "allowed": ("labels that could have been asked for", lambda s: s.state.allowed),
            "waiting_batches": ("micro-batches that wait for the learner", lambda s: s.learner.waiting),
            "pictures_under_way": ("pictures that wait for their prediction", lambda s: s.batcher.under_way),
            "drift": ("relative distance of the adapted tensors from the source", lambda s: s.drift),
            "audited": ("audited samples with an answer", lambda s: s.state.audit.total),
        }
        for key, (text, read) in gauges.items():
            gauge = GaugeMetricFamily(f"wise_atta_{key}", text, labels=["stream"])
            for name, stream in streams.items():
                gauge.add_metric([name], read(stream))
            yield gauge
        accuracy = GaugeMetricFamily(
            "wise_atta_accuracy", "of audited samples, with its interval", labels=["stream", "of"]
        )
        for name, stream in streams.items():
            audit = stream.state.audit
            if audit.total:
                low, high = wilson(audit.right, audit.total)
                for of, value in (("share", audit.right / audit.total), ("low", low), ("high", high)):
                    accuracy.add_metric([name, of], value)
        yield accuracy
        questions = GaugeMetricFamily("wise_atta_questions", "by state", labels=["stream", "state"])
        with self.service.ledger.read() as session:
            for name in streams:
                for state, count in count_by(session, Question.state, Question.stream == name).items():
                    questions.add_metric([name, state], count)
        yield questions


class Metrics:
    """The registry of one service.

    Parameters
    ----------
    service
        What is watched.
    """

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Streams(service))
        # Memory, processor time and open files of the whole service.
        ProcessCollector(registry=self.registry)
        self.seconds = Histogram(
            "wise_atta_http_seconds",
            "time from request to reply",
            ["route", "status"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application with its requests timed."""

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status = time.perf_counter(), 500

            async def watch(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", "none")
                self.seconds.labels(route, str(status)).observe(time.perf_counter() - began)

        return timed

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
