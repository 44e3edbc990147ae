"""The live service: a classifier that predicts, adapts, asks people for labels, and forgets nothing."""
