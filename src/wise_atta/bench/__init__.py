"""Experiments: described, run, recorded, compared."""
