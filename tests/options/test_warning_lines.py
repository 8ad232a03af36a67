"""A warning names the line of the user, also where a standard module stands between (contract 27)."""

import dataclasses
import warnings

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions


def test_c27_a_copy_of_options_warns_at_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = DynamicEmbTableOptions(max_capacity=64, score_strategy=DynamicEmbScoreStrategy.NO_EVICTION)
        dataclasses.replace(options, dim=4)
    assert [warning.filename for warning in found] == [__file__, __file__]
