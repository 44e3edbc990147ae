"""One file a step, each knowing the one before it."""
