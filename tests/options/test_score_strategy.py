"""Score strategies, their order in memory and in dumps, and eviction rules."""

from itertools import combinations, permutations

import pytest
import torch

from dynamicemb import dynamicemb_config as config
from dynamicemb.dynamicemb_config import (
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictStrategy,
)

Score = DynamicEmbScoreStrategy


def test_enum_values():
    assert {m.name: int(m) for m in DynamicEmbPoolingMode} == {"SUM": 0, "MEAN": 1, "NONE": 2}
    assert {m.name: int(m) for m in DynamicEmbCheckMode} == {"ERROR": 0, "WARNING": 1, "IGNORE": 2}
    assert [m.name for m in sorted(Score)] == ["TIMESTAMP", "STEP", "CUSTOMIZED", "LFU", "NO_EVICTION"]
    assert {m.name: str(m.value) for m in DynamicEmbEvictStrategy} == {
        "LRU": "EvictStrategy.KLru",
        "LFU": "EvictStrategy.KLfu",
        "EPOCH_LRU": "EvictStrategy.KEpochLru",
        "EPOCH_LFU": "EvictStrategy.KEpochLfu",
        "CUSTOMIZED": "EvictStrategy.KCustomized",
    }


@pytest.mark.parametrize("member", EvictStrategy)
def test_evict_strategy_from_its_name_or_its_saved_form(member):
    assert config.string_to_evict_strategy(member.name) is member
    assert config.string_to_evict_strategy(str(member)) is member


@pytest.mark.parametrize("name", ["", "LRU", "klru", "EvictStrategy."])
def test_unknown_evict_strategy_raises(name):
    with pytest.raises(ValueError, match=f"{name!r}.*KLru"):
        config.string_to_evict_strategy(name)


@pytest.mark.parametrize("strategy", Score)
def test_single_strategies(strategy):
    assert config.normalize_score_strategy(strategy) is strategy
    assert config.normalize_score_strategy((strategy,)) is strategy
    assert config.get_eviction_score_strategy((strategy,)) is strategy
    assert config.get_physical_score_order(strategy) == (strategy,)
    assert config.score_dump_permutation(strategy) == config.score_load_permutation(strategy) == [0]
    assert config.score_strategy_has_timestamp_column(strategy) == (strategy is Score.TIMESTAMP)


@pytest.mark.parametrize("strategy", [*permutations([Score.TIMESTAMP, Score.LFU])])
def test_compound_strategies(strategy):
    assert config.normalize_score_strategy(list(strategy)) == strategy
    assert config.get_eviction_score_strategy(strategy) is Score.LFU
    assert config.get_evict_strategy(strategy) is DynamicEmbEvictStrategy.LFU
    assert config.score_strategy_has_timestamp_column(strategy)
    assert config.get_physical_score_order(strategy) == (Score.TIMESTAMP, Score.LFU)


@pytest.mark.parametrize(
    ("strategy", "on_disk"),
    [((Score.TIMESTAMP, Score.LFU), [[100, 1], [200, 2]]), ((Score.LFU, Score.TIMESTAMP), [[1, 100], [2, 200]])],
)
def test_permutations_move_score_columns_to_the_users_order_and_back(strategy, on_disk):
    in_memory = torch.tensor([[100, 1], [200, 2]])
    dumped = in_memory[:, config.score_dump_permutation(strategy)]
    assert dumped.tolist() == on_disk
    assert torch.equal(dumped[:, config.score_load_permutation(strategy)], in_memory)


BAD_PAIRS = [p for p in combinations(Score, 2) if set(p) != {Score.TIMESTAMP, Score.LFU}] + [(s, s) for s in Score]


@pytest.mark.parametrize("strategy", [*BAD_PAIRS, (Score.TIMESTAMP, Score.LFU, Score.LFU)])
def test_other_combinations_are_refused(strategy):
    for call in (config.validate_score_strategy, lambda s: DynamicEmbTableOptions(score_strategy=s)):
        with pytest.raises(NotImplementedError, match=f"score_strategy.*{strategy[0].name}.*TIMESTAMP with LFU"):
            call(strategy)


@pytest.mark.parametrize("strategy", [0, "LFU", (), (Score.LFU, 0), {Score.LFU}, None])
def test_non_strategies_raise_type_error(strategy):
    with pytest.raises(TypeError, match="score_strategy"):
        config.validate_score_strategy(strategy)


def test_implied_evict_strategies():
    implied = {strategy.name: config.get_evict_strategy(strategy).name for strategy in Score}
    assert implied == {
        "TIMESTAMP": "LRU",
        "STEP": "CUSTOMIZED",
        "CUSTOMIZED": "CUSTOMIZED",
        "LFU": "LFU",
        "NO_EVICTION": "CUSTOMIZED",
    }


@pytest.mark.parametrize(("value", "warn"), [(None, True), ("1", True), ("", True), ("0", False)])
def test_environment_variable_silences_the_score_warning(monkeypatch, value, warn):
    monkeypatch.delenv("DYNAMICEMB_CSTM_SCORE_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", value)
    assert config.warning_for_cstm_score() is warn
