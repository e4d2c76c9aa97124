"""Where a score stands beside its floor."""

from __future__ import annotations

import numpy as np
import pytest

from attn_zoo.report.analysis.floor import judge
from attn_zoo.report.analysis.metric import Metric
from attn_zoo.report.analysis.scores import mean_with_interval


@pytest.mark.parametrize(("num_seeds", "spread"), [(3, 0.01), (10, 0.03)])
def test_of_scores_that_are_the_floors_own_few_beat_it(num_seeds, spread):
    """Seeds share a test set of 2,500, of which scores are off by 0.01: beyond each error alone are 6 % of ten."""
    generator, floor, num_draws = np.random.default_rng(0), 0.5, 3_000
    of_test_sets = generator.normal(floor, 0.01, (num_draws, 1))
    draws = of_test_sets + generator.normal(0.0, spread, (num_draws, num_seeds))

    def verdict(scores):
        mean, low, high = mean_with_interval(scores)
        assert mean is not None
        standing = judge(mean, low, high, 2_500, {"rule": floor}, Metric("accuracy"))
        return standing and standing.verdict

    num_beaten = sum(verdict(own) == "beaten" for own in draws.tolist())
    assert 0 < num_beaten < 0.035 * num_draws  # 2.5 % are one side of 95 %
    assert {verdict(own) for own in (draws[:50] + 0.2).tolist()} == {"beaten"}
