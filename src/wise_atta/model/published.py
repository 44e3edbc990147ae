"""Published: what requests are answered from, swapped by one reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from wise_atta.model.layout import Version


@dataclass(frozen=True, eq=False)
class Published:
    """One moment of a set of weights: the values of its tensors, and its moving statistics, if any."""

    version: Version
    running: Tensor | None = None


class Publisher:
    """Who changes values and moving statistics, and publishes both.

    Attributes
    ----------
    published
        What requests are answered from. Read it once for each.
    """

    def __init__(self, version: Version, running: Tensor | None) -> None:
        self.published = Published(version, running)
        self._draft: Published | None = None

    @property
    def current(self) -> Published:
        """What was published last, or, within `at_once`, will be: what updates start from."""
        draft = self._draft
        return self.published if draft is None else draft

    @current.setter
    def current(self, values: Published) -> None:
        if self._draft is None:
            self.published = values
        else:
            self._draft = values

    @property
    def live(self) -> Version:
        """The values of the adapted tensors."""
        return self.current.version

    @property
    def running(self) -> Tensor | None:
        """The moving statistics, where the mode has any."""
        return self.current.running

    @running.setter
    def running(self, values: Tensor | None) -> None:
        self.current = Published(self.live, values)

    def publish(self, flat: Tensor) -> None:
        """Make these values the live version. The vector must not be written to afterwards."""
        self.current = Published(Version(flat, self.live.layout), self.running)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Publish all changes made within this at its end, together."""
        if self._draft is not None:
            yield
            return
        self._draft = self.published
        try:
            yield
        finally:
            self.published = self._draft
            self._draft = None
