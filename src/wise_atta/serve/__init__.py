"""How does a classifier live among people? A service that predicts, adapts, asks for labels, and forgets nothing."""
