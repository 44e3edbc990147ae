"""How to learn: losses and update rules, and which tensors they touch."""

from wise_atta.average import Average as Average, Redundancy as Redundancy
from wise_atta.how.anchored import Anchored as Anchored, Anchors as Anchors
from wise_atta.how.balance import Balanced as Balanced
from wise_atta.how.candidates import Candidates as Candidates
from wise_atta.how.consistency import cross_entropy as cross_entropy, symmetric_cross_entropy as symmetric_cross_entropy
from wise_atta.how.descend import Descend as Descend
from wise_atta.how.distill import Distillation as Distillation, Tutor as Tutor
from wise_atta.how.fisher import SourceData as SourceData, SourcePenalty as SourcePenalty, fisher as fisher
from wise_atta.how.labels import Labels as Labels, Late as Late
from wise_atta.how.likelihood_ratio import LikelihoodRatio as LikelihoodRatio
from wise_atta.how.objective import Entropy as Entropy, Objective as Objective, ReliableEntropy as ReliableEntropy
from wise_atta.how.optimizer import Optimizer as Optimizer
from wise_atta.how.replay import Replay as Replay
from wise_atta.how.restore import Restore as Restore
from wise_atta.how.sharpness import SharpnessAware as SharpnessAware, climb as climb
from wise_atta.how.sums import Loss as Loss, Sums as Sums
from wise_atta.how.teacher import TeacherStudent as TeacherStudent
from wise_atta.how.two_step import PublishedTwoStep as PublishedTwoStep, TwoStep as TwoStep
from wise_atta.how.undo import remember as remember
from wise_atta.how.update import (
    GradientUpdate as GradientUpdate,
    NoUpdate as NoUpdate,
    Question as Question,
    Update as Update,
    skipped as skipped,
)
from wise_atta.how.views import Augment as Augment, Augmentation as Augmentation
from wise_atta.signals import confident as confident, trust as trust
