"""Memory of the process: kept for the next tensors, or given back."""

from __future__ import annotations

import ctypes
import os

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, for its next tensors; whether that could be done.

    Large tensors on a CPU otherwise come fresh from the system and go back to it, and writing to fresh memory costs an
    interrupt every four kilobytes. It is a setting of the whole process and cannot be taken back: the process then
    stays as large as it was at its peak, unless `release_memory` is called. Threads that are started later share one
    heap, since those of their own are too small for large tensors; so call it before there are any. Only glibc, the C
    library of most Linux systems, has it: elsewhere nothing happens, and the answer is False.
    """
    libc = _glibc()
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    return libc is not None and all(libc.mallopt(option, value) for option, value in settings)


def release_memory() -> None:
    """Give all memory back to the system that is free at the moment, where glibc is the C library."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):  # Windows has no such function, other systems no such name
        return None
    return ctypes.CDLL(None) if version else None
