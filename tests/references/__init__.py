"""How are the references of `wise_atta.reference` played? On scenarios of five batches, step by step, with no chance.

`REFERENCES[name].run(**scenario)` gives a `Step` a batch. What a description leaves open stands in the file of the
method. Where library and reference read it differently, the description decided, then the paper, then what was
published.
"""

from references.play import REFERENCES, Reference, Step

__all__ = ["REFERENCES", "Reference", "Step"]
