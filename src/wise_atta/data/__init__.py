"""Data sets, corruptions, streams and source models, by name.

>>> from wise_atta.data import StreamSpec, open_stream
>>> stream, truth = open_stream(StreamSpec(data="digits", batch=64))
>>> stream.length, len(truth)
(14, 896)
"""

from wise_atta.data.catalog import open_dataset
from wise_atta.data.datasets import Dataset, picture_of
from wise_atta.data.streams import StreamSpec, from_iterable, open_stream

__all__ = ["Dataset", "StreamSpec", "from_iterable", "open_dataset", "open_stream", "picture_of"]
