"""Warnings of steps: shown ever more seldom, and summed up."""

from mcore_rl.observability.warnings import StepWarnings


def test_a_warning_that_repeats_is_shown_ever_more_seldom_and_summed_up(capsys):
    warnings = StepWarnings()
    for step in range(1, 21):
        warnings.begin_step()
        if step >= 7:
            warnings.add("all advantages were 0", step, "all advantages are 0")
    lines = [
        line.removeprefix("mcore-rl: warning: ") for line in capsys.readouterr().err.split("\n")
    ]
    assert lines == [
        "step 7: all advantages are 0",
        "step 8: all advantages are 0 (so far in 2 steps)",
        "step 10: all advantages are 0 (so far in 4 steps)",
        "step 14: all advantages are 0 (so far in 8 steps)",
        "",
    ]
    assert warnings.summary() == "steps: in 14 of 20 all advantages were 0"


def test_a_run_without_a_warning_says_nothing(capsys):
    warnings = StepWarnings()
    warnings.begin_step()
    assert warnings.summary() == capsys.readouterr().err == ""


def test_what_settings_mean_to_happen_is_counted_without_a_word(capsys):
    warnings = StepWarnings()
    for _ in range(3):
        warnings.begin_step()
        warnings.count("fewer than half of 64 groups passed the filter")
    assert capsys.readouterr().err == ""
    assert warnings.summary() == "steps: in 3 of 3 fewer than half of 64 groups passed the filter"


def test_each_kind_has_a_count_of_its_own(capsys):
    warnings = StepWarnings()
    for step in (1, 2):
        warnings.begin_step()
        warnings.add("a", step, "is a")
    warnings.add("b", 2, "is b")
    assert capsys.readouterr().err.count("so far") == 1
    assert warnings.summary() == "steps: in 2 of 2 a; in 1 of 2 b"
