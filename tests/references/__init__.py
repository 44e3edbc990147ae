"""What should each method compute? Slow, plain references in float64, written from the methods' descriptions alone.

Every module holds `run(net, batches, …) -> list[Step]` with each constant of the method as a keyword argument,
`scenarios() -> list[(name, kwargs)]` that together make every constant matter within five batches (`run(**kwargs)`
plays one; `SHOWN_BY` names those that show what the first does not), and a docstring section *Readings* for what the
description leaves open. Where library and reference read it differently, the description decided, then the paper, then
what was published; the readings say what came of it. Nothing here imports the library.
"""
