"""How does the model learn? Losses and update rules, and which tensors they touch."""

from wise_atta.average import Average, Redundancy
from wise_atta.how.anchored import Anchored, Anchors
from wise_atta.how.balance import Balanced
from wise_atta.how.candidates import Candidates
from wise_atta.how.consistency import cross_entropy, symmetric_cross_entropy
from wise_atta.how.descend import Descend
from wise_atta.how.distill import Distillation, Tutor
from wise_atta.how.fisher import SourceData, SourcePenalty, fisher
from wise_atta.how.labels import Labels, Late
from wise_atta.how.likelihood_ratio import LikelihoodRatio
from wise_atta.how.objective import Entropy, Objective, ReliableEntropy
from wise_atta.how.optimizer import Optimizer
from wise_atta.how.replay import Replay
from wise_atta.how.restore import Restore
from wise_atta.how.sharpness import SharpnessAware, climb
from wise_atta.how.sums import Loss, Sums
from wise_atta.how.teacher import TeacherStudent
from wise_atta.how.two_step import PublishedTwoStep, TwoStep
from wise_atta.how.undo import remember
from wise_atta.how.update import GradientUpdate, NoUpdate, Question, Update, skipped
from wise_atta.how.views import Augment, Augmentation
from wise_atta.signals import confident, trust

__all__ = [
    "Anchored",
    "Anchors",
    "Augment",
    "Augmentation",
    "Average",
    "Balanced",
    "Candidates",
    "Descend",
    "Distillation",
    "Entropy",
    "GradientUpdate",
    "Labels",
    "Late",
    "LikelihoodRatio",
    "Loss",
    "NoUpdate",
    "Objective",
    "Optimizer",
    "PublishedTwoStep",
    "Question",
    "Redundancy",
    "ReliableEntropy",
    "Replay",
    "Restore",
    "SharpnessAware",
    "SourceData",
    "SourcePenalty",
    "Sums",
    "TeacherStudent",
    "Tutor",
    "TwoStep",
    "Update",
    "climb",
    "confident",
    "cross_entropy",
    "fisher",
    "remember",
    "skipped",
    "symmetric_cross_entropy",
    "trust",
]
