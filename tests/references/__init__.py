"""What should each method compute? Slow, plain references in float64, written from the methods' descriptions alone.

Every module holds `run(net, batches, …) -> list[Step]` with each constant of the method as a keyword argument,
`scenarios() -> list[(name, kwargs)]` that together make every constant matter within five batches (`run(**kwargs)`
plays one; `SHOWN_BY` names those that show what the first does not), and a docstring section *Readings* for what the
description leaves open. Nothing here imports the library.
"""
