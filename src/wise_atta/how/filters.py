"""Filters, where `how` had them."""

from wise_atta.average import Redundancy as Redundancy
from wise_atta.signals import confident as confident
from wise_atta.signals import trust as trust
