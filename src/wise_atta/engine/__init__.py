"""Engines: in which order, in which precision and by which kernels a machine does what the loop says."""
