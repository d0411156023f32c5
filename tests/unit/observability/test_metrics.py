import pytest

from mcore_rl.observability.metrics import merge


def test_the_name_of_a_metric_says_how_it_is_merged():
    parts = [
        {"loss": 1.0, "a/max_gap": 0.5, "gap_min": 0.1, "time_s_sum": 2.0, "train/num_tokens": 30},
        {"loss": 2.0, "a/max_gap": 0.2, "gap_min": 0.3, "time_s_sum": 1.0, "train/num_tokens": 10},
    ]
    assert merge(parts, weights=[30, 10]) == {
        "loss": 1.25,
        "a/max_gap": 0.5,
        "gap_min": 0.1,
        "time_s_sum": 3.0,
        "train/num_tokens": 40,
    }


def test_the_word_may_come_first_or_last():
    parts = [{"ratio_max": 1.0, "min_ratio": 3.0}, {"ratio_max": 2.0, "min_ratio": 5.0}]
    assert merge(parts) == {"ratio_max": 2.0, "min_ratio": 3.0}


def test_without_weights_all_parts_weigh_the_same():
    assert merge([{"loss": 1.0}, {"loss": 2.0}]) == {"loss": 1.5}


def test_a_metric_is_averaged_over_the_parts_that_have_it():
    merged = merge([{"loss": 1.0, "kl": 4.0}, {"loss": 3.0}, {}], weights=[1, 3, 9])
    assert merged == {"loss": 2.5, "kl": 4.0}


def test_a_mean_over_no_weight_is_left_out():
    assert merge([{"loss": 0.0, "num_tokens": 0}], weights=[0]) == {"num_tokens": 0}


def test_weights_must_be_one_a_part():
    with pytest.raises(ValueError, match="zip"):
        merge([{"loss": 1.0}], weights=[1, 2])


def test_nothing_merges_to_nothing():
    assert merge([]) == {}
