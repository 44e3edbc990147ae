"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("query", sa.String(length=64), nullable=False),
        sa.Column("by", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("label", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("agrees", sa.Boolean(), nullable=True),
        sa.Column("seq", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("answers_by_person", "answers", ["by", "id"], unique=False)
    op.create_index("answers_by_query", "answers", ["stream", "query"], unique=False)
    op.create_table(
        "budget",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("query", sa.String(length=64), nullable=False),
        sa.Column("units", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("stream", "query", "units", name="budget_once"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("checkpoints_by_stream", "checkpoints", ["stream", "seq"], unique=False)
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("pictures", sa.LargeBinary(), nullable=True),
        sa.Column("skipped", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_stream", "events", ["stream", "seq"], unique=False)
    op.create_table(
        "learned",
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("query", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("stream", "query"),
    )
    op.create_table(
        "notices",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=True),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("notices_by_time", "notices", ["at"], unique=False)
    op.create_table(
        "queries",
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("audit", sa.Boolean(), nullable=False),
        sa.Column("asked_at", sa.Float(precision=53), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("guesses", sa.JSON(), nullable=False),
        sa.Column("picture_kind", sa.String(length=8), nullable=False),
        sa.Column("picture", sa.LargeBinary(), nullable=True),
        sa.Column("query", sa.LargeBinary(), nullable=True),
        sa.Column("shown_at", sa.Float(precision=53), nullable=True),
        sa.Column("lease_by", sa.String(length=64), nullable=True),
        sa.Column("lease_until", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("stream", "id"),
    )
    op.create_index("queries_by_state", "queries", ["stream", "state", "seq"], unique=False)
    op.create_table(
        "reach",
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("cut", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
    )
    op.create_table(
        "showings",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("query", sa.String(length=64), nullable=False),
        sa.Column("by", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
