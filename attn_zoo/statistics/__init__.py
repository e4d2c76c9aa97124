"""What samples allow us to say: medians and means with intervals, and comparisons of two models or two curves.

Intervals are 95 %. Everything random is seeded, so that a report made twice is the same twice.
"""

from __future__ import annotations

from attn_zoo.statistics.growth import (
    CostFit,
    Crossover,
    Exponent,
    LocalSlope,
    crossover,
    fit_cost,
    fit_exponent,
    local_slopes,
)
from attn_zoo.statistics.medians import (
    Ratio,
    median_interval,
    process_spread,
    quartiles,
    ratio_of_runs,
    time_ratio,
    time_summary,
)
from attn_zoo.statistics.paired import PairedDifference, interval_of_means, mean_interval, paired_difference
from attn_zoo.statistics.pooling import pool_records

__all__ = [
    "CostFit",
    "Crossover",
    "Exponent",
    "LocalSlope",
    "PairedDifference",
    "Ratio",
    "crossover",
    "fit_cost",
    "fit_exponent",
    "interval_of_means",
    "local_slopes",
    "mean_interval",
    "median_interval",
    "paired_difference",
    "pool_records",
    "process_spread",
    "quartiles",
    "ratio_of_runs",
    "time_ratio",
    "time_summary",
]
