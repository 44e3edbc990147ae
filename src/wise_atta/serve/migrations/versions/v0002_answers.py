"""Ways to some answers that do not lead through all of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    judged = sa.text("agrees IS NOT NULL")
    op.create_index("answers_by_status", "answers", ["status"], unique=False)
    op.create_index("answers_by_time", "answers", ["stream", "at"], unique=False)
    op.create_index(
        "answers_judged", "answers", ["by", "id"], unique=False, sqlite_where=judged, postgresql_where=judged
    )
