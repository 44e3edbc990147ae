"""The HTTP application: routes, roles, and errors as replies."""

# Annotations are needed as values here: FastAPI reads them, and some name what only `create_app` knows.

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from numpy.typing import NDArray
from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

import wise_atta
from wise_atta import errors
from wise_atta.engine import memory
from wise_atta.serve import api, ledger as db, trust
from wise_atta.serve.auth import Buckets, Caller, Gate
from wise_atta.serve.batcher import Full, Job, Stopping
from wise_atta.serve.ledger import Notice, Question, Reply
from wise_atta.serve.metrics import Metrics
from wise_atta.serve.middleware import RequestFilter
from wise_atta.serve.retention import close_old, prune
from wise_atta.serve.revoke import revoke
from wise_atta.serve.service import LiveStream, Service
from wise_atta.serve.state import Event, wilson
from wise_atta.serve.uploads import Sample, TooLarge, to_png

T = TypeVar("T")
Since = Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds since 1970")]
_log = logging.getLogger("wise_atta.serve")
_GIVE_BACK_S = 60.0
PAGES = Path(__file__).parent / "pages"
_STATUS: list[tuple[type[Exception], int]] = [
    (TooLarge, 413),
    (Stopping, 503),
    (db.Lost, 503),
    (trust.Gone, 410),
    (errors.UnknownQuery, 404),
    (errors.UnknownName, 404),
    (errors.Conflict, 409),
    (errors.BadInput, 422),
    (errors.BadLabel, 422),
    (errors.WiseAttaError, 400),
]
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": api.Problem, "description": "The request cannot be read"},
    401: {"model": api.Problem, "description": "No token, or one that is not known"},
    403: {"model": api.Problem, "description": "The token has another role, or the call comes from another site"},
    404: {"model": api.Problem, "description": "There is no such stream or question"},
    413: {"model": api.Problem, "description": "Larger than the limit"},
    422: {"model": api.Problem, "description": "Something in the request is not as it should be"},
    429: {"model": api.Problem, "description": "Too many requests; Retry-After says when to come back"},
    503: {"model": api.Problem, "description": "Not now"},
}
_CONFLICTS: dict[int | str, dict[str, Any]] = {
    409: {"model": api.Problem, "description": "Answered otherwise before, or in somebody else's hands"},
    410: {"model": api.Problem, "description": "The question has expired"},
}
_KINDS: dict[int | str, dict[str, Any]] = {415: {"model": api.Problem, "description": "A kind that is not taken"}}
_PREDICT_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["pictures"],
                "properties": {"pictures": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
        "application/json": {"schema": api.Pictures.model_json_schema()},
        "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
    },
}


def create_app(service: Service, *, loopback: bool = False) -> FastAPI:
    """The application around a service. It closes the service when it ends.

    Parameters
    ----------
    service
        What answers.
    loopback
        Whether only this machine can reach it: then no token is needed until the first one is made.
    """
    gate = Gate(service.ledger, open_without_tokens=loopback)
    limits = service.settings.limits
    buckets, failures = Buckets(limits.rate, limits.burst), Buckets(limits.failures / 60, limits.failures)
    metrics = Metrics(service)
    decoding = ThreadPoolExecutor(2, thread_name_prefix="decoding")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        chores = [asyncio.create_task(_keep(service)), asyncio.create_task(_give_back())]
        yield
        for chore in chores:
            chore.cancel()
        decoding.shutdown()
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="wise-atta",
        version=wise_atta.__version__,
        description="Predicts, adapts, asks people for few labels, and forgets nothing.",
        lifespan=lifespan,
        # The usual pages load their scripts from another host.
        docs_url=None,
        redoc_url=None,
        responses=_REFUSALS,
    )
    app.state.service, app.state.gate = service, gate

    def is_open() -> bool:
        try:
            return gate.is_open
        except SQLAlchemyError:
            # Strict about where a call comes from; it will be told what is wrong when its token is looked up.
            return True

    app.add_middleware(RequestFilter, max_body=limits.body, patience=limits.patience, is_open=is_open)

    app.add_middleware(metrics.around)
    _handle_errors(app)

    # -- who ----------------------------------------------------------------------------------------------------

    def allow(*roles: str) -> Callable[[Request], Awaitable[Caller]]:
        # Not a plain function: that would be handed to another thread, which costs every request more than it does.
        async def check(request: Request) -> Caller:
            address = request.client.host if request.client else "nowhere"
            # Many callers may share an address, that of a proxy: those who guess must not keep out those who know.
            caller = gate.caller(request.headers.get("authorization"), look=not failures.wait(address))
            if caller is None:
                _slow_down(failures.take(address))
                has_token = "authorization" in request.headers
                unknown, missing = "this token is not known, or was revoked", "send a token: Authorization: Bearer …"
                raise HTTPException(401, unknown if has_token else missing, {"WWW-Authenticate": "Bearer"})
            _slow_down(buckets.take(caller.name))
            if not any(caller.may(role) for role in roles):
                raise HTTPException(403, f"this takes the role {' or '.join(roles)}; the token's is {caller.role}")
            return caller

        return check

    client = Depends(allow("client"))
    annotator = Depends(allow("annotator"))
    admin = Depends(allow("admin"))
    anybody = Depends(allow("client", "annotator"))

    def stream_of(name: str) -> LiveStream:
        if name not in service.streams:
            raise HTTPException(404, f"there is no stream {name[:64]!r}: there are {', '.join(service.streams)}")
        return service.streams[name]

    def chosen(name: str | None) -> list[str]:
        return [stream_of(name).name] if name is not None else list(service.streams)

    def feed(events: list[Event]) -> None:
        for event in events:
            # A stream that is not served now takes it from its log once it is.
            if event.stream in service.streams:
                service.streams[event.stream].learner.feed(event)

    # -- predicting ---------------------------------------------------------------------------------------------

    @app.post(
        "/predict",
        tags=["predict"],
        response_model=api.Predictions,
        openapi_extra={"requestBody": _PREDICT_BODY},
        responses=_KINDS,
    )
    async def predict(
        request: Request,
        caller: Annotated[Caller, client],
        stream: api.Name = "default",
        top: Annotated[int, Query(ge=1, le=10**6, description="how many classes to name for each picture")] = 5,
    ) -> Response:
        """Classes and probabilities of pictures, at once.

        The pictures may come as files (`multipart/form-data`), in base64 (`application/json`) or as an array
        (`application/x-npy`: uint8 [n, height, width, channels], or floats in [0, 1] as the model takes them).
        """
        target = stream_of(stream)
        samples = await _samples(request, service, decoding)
        name = secrets.token_hex(8)
        reply = await asyncio.wrap_future(target.predict(Job(name, samples)))
        predictions = _predicted(reply.probabilities.numpy(), service.classes, top)
        answer = api.Predictions(request=name, stream=stream, version=reply.version, predictions=predictions)
        # As it is: what we made ourselves need not be checked again.
        return Response(answer.model_dump_json(), media_type="application/json")

    # -- asking people ------------------------------------------------------------------------------------------

    @app.get("/classes", tags=["people"])
    def classes(caller: Annotated[Caller, anybody]) -> list[str]:
        """The names of the classes, in the order of their labels."""
        return list(service.classes)

    @app.get("/queries", tags=["people"])
    async def queries(
        caller: Annotated[Caller, annotator],
        stream: api.Name | None = None,
        limit: Annotated[int, Query(ge=1, le=50)] = 1,
    ) -> api.Queries:
        """Questions to answer. For a while nobody else gets the same ones."""
        names, seconds = chosen(stream), service.settings.lease_s

        def write(session: Session) -> tuple[list[api.OpenQuery], int, list[Event]]:
            rows, events = trust.lease(session, names, caller.name, limit=limit, seconds=seconds)
            waiting = Question.stream.in_(names), Question.state == "open"
            left = db.count_by(session, Question.state, *waiting).get("open", 0)
            return [_query(row, service.classes) for row in rows], left, events

        questions, left, _ = await _written(service.ledger.write(write, lambda result: feed(result[2])))
        states = [service.streams[name].state for name in names]
        spent, allowed = sum(state.spent for state in states), sum(state.allowed for state in states)
        return api.Queries(queries=questions, open=left, spent=spent, allowed=allowed, now=time.time())

    @app.post("/queries/release", tags=["people"])
    async def release(body: api.Release, caller: Annotated[Caller, annotator]) -> api.Health:
        """Give questions back before their time is over, so that others get them at once."""
        questions = [(item.stream, item.query) for item in body.queries]
        await _written(service.ledger.write(lambda session: trust.release(session, caller.name, questions)))
        return api.Health(status="ok")

    @app.get(
        "/queries/{stream}/{query}/picture",
        tags=["people"],
        response_class=Response,
        responses={200: {"content": {"image/png": {}}, "description": "The picture"}},
    )
    async def picture(stream: api.Name, query: api.Id, caller: Annotated[Caller, annotator]) -> Response:
        """The picture of a question, encoded anew."""
        name = stream_of(stream).name

        def encode() -> bytes:
            with service.ledger.read() as session:
                row = session.get(Question, (name, query))
                if row is None or row.picture is None:
                    raise HTTPException(404, "there is no such question, or its picture was deleted")
                kind, data = row.picture_kind, row.picture
            return to_png(kind, data)

        png = await asyncio.get_running_loop().run_in_executor(decoding, encode)
        return Response(png, media_type="image/png")

    @app.post("/answers", tags=["people"], responses=_CONFLICTS)
    async def answers(body: api.Answers, caller: Annotated[Caller, annotator]) -> api.Taken:
        """Answer questions. All of the answers count, or none."""
        for name in {item.stream for item in body.answers}:
            stream_of(name)
        submitted = [trust.Submission(item.stream, item.query, item.label) for item in body.answers]

        def write(session: Session) -> tuple[list[Event], int]:
            before = _held(session)
            events = trust.answer(session, caller.name, submitted, len(service.classes))
            held = _held(session) - before
            if held:
                db.notice(session, None, "held", by=caller.name, answers=held)
            return events, held

        _, held = await _written(service.ledger.write(write, lambda result: feed(result[0])))
        return api.Taken(taken=len(submitted) - held, held=held)

    # -- looking after it ---------------------------------------------------------------------------------------

    @app.get("/streams", tags=["streams"])
    def streams(caller: Annotated[Caller, anybody]) -> list[api.Status]:
        """All streams at a glance."""
        return [_status(stream, service) for stream in service.streams.values()]

    @app.get("/streams/{name}", tags=["streams"])
    def status(name: api.Name, caller: Annotated[Caller, anybody]) -> api.Status:
        """One stream at a glance."""
        return _status(stream_of(name), service)

    @app.get("/streams/{name}/history", tags=["streams"])
    def history(
        name: api.Name,
        caller: Annotated[Caller, anybody],
        since: Since = 0.0,
        step: api.Resolution = api.Resolution.FINE,
    ) -> list[api.Point]:
        """What happened lately, in steps of 1 (for ten minutes), 10 (two hours) or 300 seconds (three days).

        It begins at the latest start. Moments at which nothing happened are left out; the last step is not over yet, so
        ask for it again with its `at` as `since`.
        """
        return stream_of(name).history.points(step=step, since=since)

    @app.get("/streams/{name}/labels", tags=["streams"])
    def labels(
        name: api.Name,
        caller: Annotated[Caller, anybody],
        since: Since = 0.0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> list[api.Given]:
        """When the latest labels that count were given, and how old their questions were; oldest first."""
        with service.ledger.read() as session:
            return _given(session, stream_of(name).name, since, limit)

    @app.post("/streams/{name}/reset", tags=["streams"])
    async def reset(name: api.Name, caller: Annotated[Caller, admin], body: api.Reset | None = None) -> api.Health:
        """Return a stream's model to the source. Its account and its questions stay."""
        stream = stream_of(name)
        policy = body.policy if body is not None else False

        def write(session: Session) -> Event:
            db.notice(session, name, "reset", by=caller.name)
            return db.log(session, name, "reset", {"policy": policy})

        await _written(service.ledger.write(write, stream.learner.feed))
        return api.Health(status="ok")

    @app.post("/streams/{name}/revoke", tags=["streams"])
    async def revoke_labels(name: api.Name, body: api.Revoke, caller: Annotated[Caller, admin]) -> api.Revoked:
        """Make labels as if they had never been. Their questions are open again; the account stays.

        It takes back what was confirmed before this call. Answers that come later count, so end a person's token first.
        """
        stream = stream_of(name)
        if not service.healthy:
            raise HTTPException(503, "a learner has stopped, or the database was lost: see the log, and restart")
        done = await _written(stream.between(lambda: revoke(stream, by=body.by, queries=body.queries)))
        return api.Revoked(answers=done.answers, exact=done.exact, replayed=done.replayed)

    @app.get("/annotators", tags=["streams"])
    def annotators(caller: Annotated[Caller, admin]) -> list[api.Annotator]:
        """How often each annotator's answers differ from the model's guess."""
        with service.ledger.read() as session:
            records = trust.records(session)
        return [
            api.Annotator(
                by=record.by,
                answers=record.answers,
                differ=record.differ,
                low=record.interval[0],
                high=record.interval[1],
                suspicious=record.suspicious,
            )
            for record in records
        ]

    @app.get("/review", tags=["streams"])
    def held(caller: Annotated[Caller, admin]) -> list[api.Held]:
        """Answers that are held for review."""
        with service.ledger.read() as session:
            return [
                api.Held(answer=row.id, stream=row.stream, query=row.query, by=row.by, at=row.at, label=row.label)
                for row in trust.held(session)
            ]

    @app.post("/review", tags=["streams"])
    async def review(body: api.Review, caller: Annotated[Caller, admin]) -> api.Health:
        """Let held answers count, or reject them and open their questions again."""
        await _written(service.ledger.write(lambda session: trust.review(session, body.answers, body.accept), feed))
        return api.Health(status="ok")

    @app.get("/notices", tags=["streams"])
    def notices(
        caller: Annotated[Caller, anybody],
        since: Since = 0.0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[api.NoticeOut]:
        """Starts, resets, trips of the guard, revocations; the latest first."""
        with service.ledger.read() as session:
            rows = session.scalars(select(Notice).where(Notice.at > since).order_by(Notice.id.desc()).limit(limit))
            return [api.NoticeOut(at=row.at, stream=row.stream, kind=row.kind, body=row.body) for row in rows]

    # -- machines -----------------------------------------------------------------------------------------------

    @app.get("/healthz", tags=["machines"])
    def healthz() -> api.Health:
        """Whether it runs as it should; needs no token."""
        if not service.healthy:
            raise HTTPException(503, "a learner has stopped, or the database was lost: see the log, and restart")
        return api.Health(status="ok")

    @app.get("/readyz", tags=["machines"])
    def readyz() -> api.Health:
        """Whether it takes requests; needs no token."""
        if not (service.ready and service.healthy):
            raise HTTPException(503, "not ready")
        return api.Health(status="ok")

    @app.get("/metrics", tags=["machines"], response_class=Response)
    def metrics_text(caller: Annotated[Caller, anybody]) -> Response:
        """Counts and times for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_pages(app)
    return app


def _add_pages(app: FastAPI) -> None:
    """Serve the pages that lie beside this file, if any; their scripts ask the same API, with the user's token."""
    for path, file in (("/", "index.html"), ("/label", "label.html")):
        if (PAGES / file).is_file():
            app.add_api_route(path, lambda file=file: FileResponse(PAGES / file), include_in_schema=False)
    if PAGES.is_dir():
        app.mount("/pages", StaticFiles(directory=PAGES), name="pages")


def _handle_errors(app: FastAPI) -> None:
    for kind, status in _STATUS:

        def refuse(request: Request, error: Exception, status: int = status) -> JSONResponse:
            return JSONResponse({"detail": str(error)}, status)

        app.add_exception_handler(kind, refuse)

    def full(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Full)
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": str(math.ceil(error.after))})

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return JSONResponse({"detail": _reasons(error.errors())}, 422)

    def stuck(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the ledger cannot be reached"}, 503, {"Retry-After": "5"})

    def gone(request: Request, error: Exception) -> JSONResponse:
        # Nobody reads this, but hanging up is no fault of the service: no 500 in the metrics, no traceback in the log.
        return JSONResponse({"detail": "the request did not end"}, 400)

    app.add_exception_handler(Full, full)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(SQLAlchemyError, stuck)


def _reasons(problems: Any) -> list[dict[str, Any]]:
    """Where and why, without the input itself: it may be anything, and need not be echoed."""
    return [{"loc": [str(part) for part in item["loc"]], "msg": str(item["msg"])} for item in problems]


def _slow_down(seconds: float) -> None:
    if seconds > 0:
        raise HTTPException(429, "too many requests: slow down", {"Retry-After": str(math.ceil(seconds))})


async def _written(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _samples(request: Request, service: Service, pool: ThreadPoolExecutor) -> list[Sample]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    uploads, loop = service.uploads, asyncio.get_running_loop()
    if kind == "multipart/form-data":
        try:
            async with request.form(max_files=service.settings.max_batch, max_fields=8) as form:
                files = [await value.read() for _, value in form.multi_items() if isinstance(value, UploadFile)]
        except OSError as error:
            # What is large waits in a temporary file until all of it is there.
            raise HTTPException(503, "there is no room for large uploads", {"Retry-After": "5"}) from error
        return await loop.run_in_executor(pool, uploads.files, files)
    body = await request.body()
    if kind == "application/json":
        try:
            # Up to the size of a whole request: too long to keep everybody else waiting.
            parsed = await loop.run_in_executor(pool, api.Pictures.model_validate_json, body)
        except ValidationError as error:
            problems = error.errors(include_input=False, include_url=False)
            if problems[0]["type"] == "json_invalid":
                raise HTTPException(400, "the body is not JSON") from error
            raise HTTPException(422, _reasons(problems[:20])) from error
        return await loop.run_in_executor(pool, uploads.encoded, parsed.pictures)
    if kind in ("application/x-npy", "application/octet-stream") or kind.startswith("image/"):
        return await loop.run_in_executor(pool, uploads.files, [body])
    raise HTTPException(415, "send multipart/form-data, application/json, application/x-npy or a picture")


def _guesses(pairs: Any, classes: tuple[str, ...]) -> list[api.Guess]:
    return [api.Guess(label=label, name=classes[label], probability=p) for label, p in pairs]


def _predicted(probabilities: NDArray[np.float64], classes: tuple[str, ...], top: int) -> list[api.Predicted]:
    # Not with torch: each of its operations lets go of the interpreter, and getting it back means waiting for others.
    count = min(top, len(classes))
    best = np.argpartition(-probabilities, count - 1, axis=1)[:, :count]
    shares = np.take_along_axis(probabilities, best, axis=1)
    order = np.argsort(-shares, axis=1, kind="stable")
    rows = []
    for labels, row in zip(
        np.take_along_axis(best, order, axis=1).tolist(),
        np.take_along_axis(shares, order, axis=1).tolist(),
        strict=True,
    ):
        named = _guesses(zip(labels, row, strict=True), classes)
        first = named[0]
        rows.append(api.Predicted(label=first.label, name=first.name, probability=first.probability, top=named))
    return rows


def _query(row: Question, classes: tuple[str, ...]) -> api.OpenQuery:
    return api.OpenQuery(
        stream=row.stream,
        query=row.id,
        audit=row.audit,
        asked_at=row.asked_at,
        lease_until=row.lease_until or 0.0,
        guesses=_guesses(row.guesses, classes),
        picture=f"/queries/{row.stream}/{row.id}/picture",
    )


def _held(session: Session) -> int:
    return db.count_by(session, Reply.status, Reply.status == "held").get("held", 0)


def _accuracy(right: int, total: int) -> api.Accuracy | None:
    if not total:
        return None
    low, high = wilson(right, total)
    return api.Accuracy(right=right, total=total, share=right / total, low=low, high=high)


def _given(session: Session, stream: str, since: float, limit: int) -> list[api.Given]:
    rows = session.execute(
        select(Reply.at, Reply.at - Question.asked_at, Question.audit, Reply.agrees)
        .join(Question, (Question.stream == Reply.stream) & (Question.id == Reply.query))
        .where(Reply.stream == stream, Reply.status == "accepted", Reply.label.is_not(None), Reply.at > since)
        .order_by(Reply.at.desc(), Reply.id.desc())
        .limit(limit)
    ).all()
    return [
        api.Given(at=at, age_s=age, audit=audit, right=agrees if audit else None)
        for at, age, audit, agrees in reversed(rows)
    ]


def _status(stream: LiveStream, service: Service) -> api.Status:
    state, tally = stream.state, stream.tally
    now = time.time()
    with service.ledger.read() as session:
        questions = db.count_by(session, Question.state, Question.stream == stream.name)
        oldest = session.scalar(
            select(func.min(Question.asked_at)).where(Question.stream == stream.name, Question.state == "open")
        )
        latest = (
            select((Reply.at - Question.asked_at).label("age"))
            .join(Question, (Question.stream == Reply.stream) & (Question.id == Reply.query))
            .where(Reply.stream == stream.name, Reply.status == "accepted", Reply.label.is_not(None))
            .order_by(Reply.id.desc())
            .limit(100)
            .subquery()
        )
        age = session.scalar(select(func.avg(latest.c.age)))
    counts = [int(count) for count in stream.classes.tolist()]
    recent = list(state.audit.recent)
    return api.Status(
        stream=stream.name,
        method=service.settings.method,
        ratio=float(service.settings.rate),
        audit=float(service.settings.audit_share),
        now=now,
        started=service.started,
        version=stream.serving.seq,
        spent=state.spent,
        allowed=state.allowed,
        seen=state.audit.account.seen,
        requests=tally.requests,
        pictures=tally.pictures,
        batches=tally.batches,
        learned=tally.learned,
        skipped=tally.skipped,
        failed=tally.failed,
        fallbacks=tally.fallbacks,
        trips=tally.trips,
        waiting=stream.learner.waiting,
        under_way=stream.batcher.under_way,
        drift=stream.drift,
        questions=questions,
        latency=stream.history.latency(now - 300),
        label_age_s=age,
        oldest_open_s=None if oldest is None else now - oldest,
        predicted={service.classes[label]: count for label, count in enumerate(counts) if count},
        accuracy=_accuracy(state.audit.right, state.audit.total),
        recent=_accuracy(sum(recent), len(recent)),
    )


async def _keep(service: Service) -> None:
    """Delete what is not to be kept any longer, once an hour."""
    days = service.settings.retain
    while days:
        before = time.time() - days * 86400
        try:
            for stream in service.streams.values():
                await _written(service.ledger.write(close_old(stream.name, before), _feeder(stream)))
            await _written(service.ledger.write(partial(prune, before=before)))
        except SQLAlchemyError:
            _log.exception("old pictures could not be deleted; next attempt in an hour")
        await asyncio.sleep(3600)


async def _give_back() -> None:
    """Give the system back what memory is free, once a minute: batches of many sizes leave holes that add up."""
    while True:
        await asyncio.sleep(_GIVE_BACK_S)
        await asyncio.to_thread(memory.release_memory)


def _feeder(stream: LiveStream) -> Callable[[Event | None], None]:
    return lambda event: None if event is None else stream.learner.feed(event)
