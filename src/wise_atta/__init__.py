"""Budgeted active test-time adaptation: a deployed classifier adapts while it predicts and asks for few labels."""

from wise_atta import errors, how, methods, signals, what, when, who
from wise_atta.anchor import Anchor
from wise_atta.fast import keep_memory
from wise_atta.guard import Guard
from wise_atta.loop import Adapter
from wise_atta.model import Classifier
from wise_atta.prediction import Prediction, Step
from wise_atta.stream import Batch, Stream
from wise_atta.who import CANT_TELL, SKIP, Answer, Query
from wise_atta.wrap import adapt

__version__ = "0.1.0"

__all__ = [
    "CANT_TELL",
    "SKIP",
    "Adapter",
    "Anchor",
    "Answer",
    "Batch",
    "Classifier",
    "Guard",
    "Prediction",
    "Query",
    "Step",
    "Stream",
    "adapt",
    "errors",
    "how",
    "keep_memory",
    "methods",
    "signals",
    "what",
    "when",
    "who",
]
