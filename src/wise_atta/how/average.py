"""Moving averages, where `how` had them."""

from wise_atta.average import Average as Average
