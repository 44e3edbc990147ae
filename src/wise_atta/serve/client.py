"""A small typed client of the service."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from wise_atta import errors
from wise_atta.serve import api

M = TypeVar("M", bound=BaseModel)


class Refused(errors.WiseAttaError):
    """The service did not do what it was asked; `status` is what it answered with."""

    def __init__(self, status: int, detail: object) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class Client:
    """Talks to a service.

    Parameters
    ----------
    url
        Where it is, for example ``http://localhost:8000``.
    token
        What it lets the caller in with; not needed on the same machine as long as no token was made.
    retries
        How often a request is sent again when the service is too busy, each time after as long as it asks for.
    http
        A client of one's own to send requests with.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retries: int = 3, http: httpx.Client | None = None
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = http or httpx.Client(base_url=url, timeout=30.0)
        self._http.headers.update(headers)
        self.retries = retries

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(
        self,
        pictures: NDArray[Any] | Sequence[bytes | str | Path] | bytes | str | Path,
        *,
        stream: str = "default",
        top: int = 5,
    ) -> api.Predictions:
        """Classes and probabilities of pictures: an array [n, …], or one or more files by their bytes or paths."""
        options: dict[str, Any]
        if isinstance(pictures, bytes | str | Path):
            pictures = [pictures]
        if isinstance(pictures, np.ndarray):
            buffer = io.BytesIO()
            np.save(buffer, pictures, allow_pickle=False)
            options = {"content": buffer.getvalue(), "headers": {"content-type": "application/x-npy"}}
        else:
            files = [item if isinstance(item, bytes) else Path(item).read_bytes() for item in pictures]
            options = {"files": [("pictures", (f"{n}", data)) for n, data in enumerate(files)]}
        reply = self._send("POST", "/predict", params={"stream": stream, "top": top}, **options)
        return api.Predictions.model_validate_json(reply.content)

    def classes(self) -> list[str]:
        """The names of the classes, in the order of their labels."""
        return [str(name) for name in self._send("GET", "/classes").json()]

    def queries(self, *, stream: str | None = None, limit: int = 1) -> api.Queries:
        """Questions to answer; nobody else gets them for a while."""
        params: dict[str, Any] = {"limit": limit} | ({} if stream is None else {"stream": stream})
        return api.Queries.model_validate_json(self._send("GET", "/queries", params=params).content)

    def picture(self, query: api.OpenQuery) -> bytes:
        """The picture of a question, as PNG."""
        return self._send("GET", query.picture).content

    def answer(self, query: api.OpenQuery, label: int | Literal["cant_tell", "skip"]) -> api.Taken:
        """Answer a question."""
        return self.answers([api.AnswerIn(stream=query.stream, query=query.query, label=label)])

    def answers(self, answers: Sequence[api.AnswerIn]) -> api.Taken:
        """Answer several questions; all of the answers count, or none."""
        return self._post("/answers", api.Answers(answers=list(answers)), api.Taken)

    def stream(self, name: str = "default") -> api.Status:
        """A stream at a glance."""
        return api.Status.model_validate_json(self._send("GET", f"/streams/{name}").content)

    def reset(self, name: str = "default", *, policy: bool = False) -> None:
        """Return a stream's model to the source."""
        self._post(f"/streams/{name}/reset", api.Reset(policy=policy), api.Health)

    def revoke(
        self, name: str = "default", *, by: str | None = None, queries: Sequence[str] | None = None
    ) -> api.Revoked:
        """Make labels as if they had never been: those of a person, or those of some questions."""
        body = api.Revoke(by=by, queries=None if queries is None else list(queries))
        return self._post(f"/streams/{name}/revoke", body, api.Revoked)

    def ready(self) -> bool:
        """Whether the service takes requests."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _post(self, path: str, body: BaseModel, kind: type[M]) -> M:
        headers = {"content-type": "application/json"}
        return kind.model_validate_json(
            self._send("POST", path, content=body.model_dump_json(), headers=headers).content
        )

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for attempt in range(self.retries + 1):
            reply = self._http.request(method, path, **options)
            if reply.status_code != 429 or attempt == self.retries:
                break
            time.sleep(float(reply.headers.get("retry-after", 1)))
        if reply.is_success:
            return reply
        try:
            detail = reply.json()["detail"]
        except (ValueError, KeyError, TypeError):
            detail = reply.text[:200]
        raise Refused(reply.status_code, detail)
