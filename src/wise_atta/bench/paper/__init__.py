"""The paper as a program: every table and figure of it by name, as runs, beside its own numbers."""

from wise_atta.bench.paper.define import experiments, places
from wise_atta.bench.paper.items import ITEMS, Item, Row, item

__all__ = ["ITEMS", "Item", "Row", "experiments", "item", "places"]
