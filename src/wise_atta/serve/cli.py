"""`wise-atta serve`, which starts the service, and `wise-atta ledger …`, which looks after its database."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from wise_atta import errors, typed
from wise_atta.data import models
from wise_atta.engine import memory
from wise_atta.serve import auth
from wise_atta.serve.config import Limits, Settings, is_loopback
from wise_atta.serve.ledger import Ledger, Token
from wise_atta.serve.retention import backup, export, is_missing, prune, restore
from wise_atta.who import Context

app = typer.Typer(help="The ledger of a service: tokens, export, retention, backup.", no_args_is_help=True)
tokens = typer.Typer(help="Who may do what.", no_args_is_help=True)
app.add_typer(tokens, name="token")
console = Console()

Database = Annotated[
    str, typer.Option("--database", envvar="WISE_ATTA_DATABASE", help="SQLAlchemy URL: SQLite file or PostgreSQL.")
]
T = TypeVar("T")
DATABASE = "sqlite:///wise-atta.db"


def read_classes(path: Path | None) -> tuple[str, ...] | None:
    """Class names, one a line."""
    if path is None:
        return None
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadConfig(f"{path} cannot be read as a list of class names: {error}") from error
    if len(set(names)) != len(names):
        raise errors.BadConfig(f"{path} names a class twice")
    return names


def serve(
    model: Annotated[str, typer.Option(help="A model by name, file:WEIGHTS#ARCHITECTURE, or package.module:factory.")],
    classes: Annotated[Path | None, typer.Option(help="Names of the classes, one a line.")] = None,
    ratio: Annotated[str, typer.Option(help="Labels per picture.")] = "0.01",
    audit: Annotated[str, typer.Option(help="Share of them that measures accuracy.")] = "0.1",
    method: Annotated[str, typer.Option(help="How to adapt.")] = "wise",
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, name=value.")] = None,
    statistics: Annotated[str, typer.Option(help="What BatchNorm normalises with.")] = "source",
    context: Annotated[
        str, typer.Option(help="How a late label's sample is normalised: own, current, source.")
    ] = "own",
    late_weight: Annotated[
        float, typer.Option(help="Micro-batches after which a late label counts half; 0: it counts like any other.")
    ] = 10.0,
    late_limit: Annotated[int | None, typer.Option(help="Micro-batches after which a label is not learned.")] = None,
    stream: Annotated[list[str] | None, typer.Option(help="Name of a stream; may be given several times.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    database: Database = DATABASE,
    max_batch: Annotated[int, typer.Option(help="Pictures of a micro-batch, and of a request, at most.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(help="How long a picture waits for others.")] = 10.0,
    max_queue: Annotated[int, typer.Option(help="Pictures under way before requests are refused.")] = 1024,
    max_lag: Annotated[int, typer.Option(help="Micro-batches waiting before updates are skipped.")] = 32,
    checkpoint_s: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    checkpoint_events: Annotated[int, typer.Option(help="Events between checkpoints, at most.")] = 500,
    lease_s: Annotated[float, typer.Option(help="How long a question is one person's.")] = 120.0,
    keep_log: Annotated[
        float,
        typer.Option(help="Days to keep the event log, with every picture and twenty checkpoints, for revocation."),
    ] = 0,
    retain: Annotated[float, typer.Option(help="Days to keep the pictures of questions; 0 keeps them.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of one forward.")] = 1,
    rate: Annotated[float, typer.Option(help="Requests per second and caller; 0 lifts the limit.")] = 0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.")] = Limits.body,
    max_pixels: Annotated[int, typer.Option(help="Pixels of a request.")] = Limits.pixels,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
) -> None:
    """Serve a model that adapts while it predicts, and asks people for few labels."""
    try:
        settings = Settings(
            database=database,
            streams=tuple(stream or ["default"]),
            method=method,
            options=typed.pairs("--option", option or []),
            ratio=ratio,
            audit=audit,
            statistics=statistics,
            context=cast(Context, context),  # checked where the adapter is made
            late_weight=late_weight or None,
            late_limit=late_limit,
            classes=read_classes(classes),
            max_batch=max_batch,
            max_wait_ms=max_wait_ms,
            max_queue=max_queue,
            max_lag=max_lag,
            checkpoint_s=checkpoint_s,
            checkpoint_events=checkpoint_events,
            lease_s=lease_s,
            keep_log=keep_log,
            retain=retain,
            threads=threads,
            seed=seed,
            limits=Limits(body=max_body, pixels=max_pixels, rate=rate),
        )
        run(model, settings, host, port)
    except errors.WiseAttaError as error:
        raise _failed(error) from error


def run(model: str, settings: Settings, host: str, port: int) -> None:
    """Serve until told to stop. Refuses to be open to other machines without a token."""
    import uvicorn

    from wise_atta.serve.app import create_app
    from wise_atta.serve.middleware import Patient
    from wise_atta.serve.service import Service

    loopback = is_loopback(host)
    if not loopback:
        require_tokens(settings.database, host)
    _hush()
    # One heap for all threads: with one for each, every one of them keeps what its thread once needed, in pieces.
    memory.keep_memory()
    service = Service(models.load(model), settings)
    try:
        listener = listen(host, port)
    except errors.BadConfig:
        service.close()
        raise
    Console(stderr=True).print(f"wise-atta listens on http://{host}:{port}", highlight=False)
    # Access logs would say who asked for which picture; /metrics has the counts.
    config = uvicorn.Config(
        create_app(service, loopback=loopback),
        host=host,
        port=port,
        log_level=os.environ.get("WISE_ATTA_LOG", "warning"),
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        http=Patient,
        ws="none",
        # Below the number of files that a process may usually have open: the ledger needs some too.
        limit_concurrency=900,
    )
    _keep_the_interpreter_responsive()
    uvicorn.Server(config).run(sockets=[listener])


def _keep_the_interpreter_responsive() -> None:
    """Shorten the turns of threads and the collections of garbage, so that requests need not wait for either."""
    # A request passes through several threads, and at each it may wait a whole turn of the learner's.
    sys.setswitchinterval(0.001)
    # What is there by now stays: to go through all of it again takes a quarter of a second.
    gc.collect()
    gc.freeze()


def _hush() -> None:
    """Keep warnings about malformed requests out of the log and of memory: Python keeps every new text for good."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of the log is about the service, not about a malformed request or one for WebSockets."""
    return not record.getMessage().startswith(("Invalid HTTP", "Unsupported upgrade", "No supported WebSocket"))


def listen(host: str, port: int) -> socket.socket:
    """Bind an address, before the service announces itself."""
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise errors.BadConfig(f"cannot listen on {host}:{port}: {error}. Give another --port or --host") from error


def require_tokens(database: str, host: str) -> None:
    """Refuse an address that other machines can reach as long as nobody has a token."""
    ledger = Ledger(database)
    try:
        with ledger.read() as session:
            known = session.scalars(select(Token).where(Token.revoked_at.is_(None))).first()
    finally:
        ledger.close()
    if known is None:
        raise errors.BadConfig(
            f"other machines can reach {host}, and there is no token: make one first "
            "(wise-atta ledger token create NAME --role admin), or listen on 127.0.0.1"
        )


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Who it is for; answers are recorded under this name.")],
    role: Annotated[str, typer.Option(help=f"One of {', '.join(auth.ROLES)}.")],
    database: Database = DATABASE,
) -> None:
    """Make a token and print it, this once. A running service takes it at once."""
    with _ledger(database, new=True) as ledger:
        print(_written(ledger, lambda session: auth.create(session, name, role)))


@tokens.command("revoke")
def revoke_token(name: Annotated[str, typer.Argument(help="Whose.")], database: Database = DATABASE) -> None:
    """Let nobody in with a token any more. A running service heeds it within a second."""
    with _ledger(database) as ledger:
        _written(ledger, lambda session: auth.revoke(session, name))


@tokens.command("list")
def list_tokens(database: Database = DATABASE) -> None:
    """Show who has a token."""
    table = Table("name", "role", "revoked")
    with _ledger(database) as ledger, ledger.read() as session:
        for row in session.scalars(select(Token).order_by(Token.name)):
            table.add_row(row.name, row.role, "yes" if row.revoked_at is not None else "")
    console.print(table)


@app.command("export")
def export_ledger(
    folder: Annotated[Path, typer.Argument(help="Where the Parquet files go.")], database: Database = DATABASE
) -> None:
    """Write every table but the tokens as a Parquet file, without pictures."""
    with _ledger(database) as ledger:
        rows = export(ledger, folder)
    for name, count in rows.items():
        print(f"{name}\t{count}")


@app.command("prune")
def prune_ledger(
    days: Annotated[float, typer.Option(min=0, help="Delete what is older.")], database: Database = DATABASE
) -> None:
    """Delete the pictures of closed questions that are older than some days."""
    with _ledger(database) as ledger:
        print(_written(ledger, lambda session: prune(session, time.time() - days * 86400)))


@app.command("backup")
def backup_ledger(
    file: Annotated[Path, typer.Argument(help="Where the copy goes; nothing may be there.")],
    database: Database = DATABASE,
) -> None:
    """Copy a SQLite ledger, as it is at one moment, while the service runs. For PostgreSQL there is pg_dump."""
    try:
        print(f"{backup(database, file):,} bytes in {file}")
    except errors.WiseAttaError as error:
        raise _failed(error) from error


@app.command("restore")
def restore_ledger(
    file: Annotated[Path, typer.Argument(help="A copy that `backup` made.")], database: Database = DATABASE
) -> None:
    """Put a copy in place of a SQLite ledger, which is kept beside it. The service has to be stopped."""
    try:
        print(restore(file, database))
    except (errors.WiseAttaError, OSError) as error:
        raise _failed(error) from error


def _failed(error: Exception) -> typer.Exit:
    # A port of -1 is no thumb pointing down.
    Console(stderr=True, emoji=False).print(f"error: {error}", highlight=False, markup=False)
    return typer.Exit(2)


@contextmanager
def _ledger(url: str, *, new: bool = False) -> Iterator[Ledger]:
    """A ledger for the time of one command, beside a service that may be running; `new` says whether it may be made."""
    try:
        if is_missing(url):
            if not new:
                raise errors.BadConfig(f"there is no ledger {url}: give the service's own with --database")
            # A token in another ledger than the service's would leave the service as open as it was.
            Console(stderr=True).print(f"made a new ledger: {url}", highlight=False, markup=False, soft_wrap=True)
        ledger = Ledger(url, exclusive=False)
        try:
            yield ledger
        finally:
            ledger.close()
    except (errors.WiseAttaError, OSError, SQLAlchemyError) as error:
        raise _failed(error) from error


def _written(ledger: Ledger, work: Callable[[Session], T]) -> T:
    return ledger.write(work).result()
