"""Memory of the process, under the name that 0.1 had for it: `wise_atta.engine.memory`."""

from wise_atta.engine.memory import keep_memory, release_memory

__all__ = ["keep_memory", "release_memory"]
