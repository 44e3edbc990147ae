"""The methods at a glance, one row each: what they ask for, adapt and remember, in the order of comparisons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One method at a glance.

    Attributes
    ----------
    name
        As `wise_atta.adapt` takes it.
    labels
        Labels a batch.
    adapts
        Which tensors.
    memory
        What it keeps beside the model, other than the optimizer's momenta of the adapted tensors.
    reference
        Where it was published.
    needs
        What must be given when it is made, if anything.
    """

    name: str
    labels: str
    adapts: str
    memory: str
    reference: str
    needs: str = ""


ROWS = (
    Row("source", "0", "nothing", "nothing", "the model as trained"),
    Row("bn", "0", "nothing", "nothing", "Schneider et al., NeurIPS 2020"),
    Row("tent", "0", "norm", "nothing", "Wang et al., ICLR 2021"),
    Row("eta", "0", "norm", "mean prediction", "Niu et al., ICML 2022"),
    Row("eata", "0", "norm", "mean prediction, Fisher and source values of norm", "Niu et al., ICML 2022", "source"),
    Row("sar", "0", "norm without the last stage", "mean loss", "Niu et al., ICLR 2023"),
    Row("cotta", "0", "all", "teacher", "Wang et al., CVPR 2022"),
    Row("roid", "0", "norm", "mean prediction, source values of norm", "Marsden et al., WACV 2024"),
    Row("simatta", "3", "all", "anchor samples", "Gui et al., ICLR 2024"),
    Row("hiltta", "3", "norm; all by labels", "scores of learning rates", "Li et al., 2024"),
    Row("cema", "by a teacher", "norm", "replayed samples, norm of the teacher", "Chen et al., ICLR 2024", "teacher"),
    Row("eatta", "1", "norm", "two loss weights, last scores by class", "Wang et al., CVPR 2025"),
    Row("wise", "≤ ratio", "norm, then head", "anchor of norm and head", "WISE-ATTA"),
)
