"""What is said of a long step: when, in which words, and on what a terminal draws."""

import threading

from mcore_rl.observability.activity import FIRST_S, Activity, Teller


class Time:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def made() -> tuple[Activity, Time, Teller, list[str]]:
    clock, lines = Time(), list[str]()
    activity = Activity(clock)
    return activity, clock, Teller(lines.append, activity), lines


def test_a_long_phase_has_lines_at_growing_intervals():
    activity, clock, teller, lines = made()
    with activity.phase("generate", 12), activity.counting(512, "samples") as came:
        for second in range(260):
            clock.seconds = 100.0 + second if second else 0.0
            came(second)
            teller.look()
    assert [line.split(", ")[1] for line in lines] == ["101 s", "120 s", "240 s"]
    assert lines[1] == "step 12: generate 20/512 samples, 120 s"


def test_the_teller_sleeps_until_a_line_can_be_due():
    """Then it costs the driver nothing."""
    activity, clock, teller, lines = made()
    assert teller.look() == FIRST_S  # what begins now is due no earlier
    clock.seconds = 10.0
    with activity.phase("update", 3):
        clock.seconds = 12.0
        assert teller.look() == FIRST_S - 2
        clock.seconds = 41.0
        assert teller.look() == 60 - 31
    assert lines == ["step 3: update, 31 s"]


def test_each_phase_is_timed_anew():
    activity, clock, teller, lines = made()
    for step in (1, 2):
        with activity.phase("update", step):
            clock.seconds += 29.0
            teller.look()
    assert lines == []


def test_short_phases_inside_of_a_long_one_do_not_hide_it():
    """An evaluation of pairs is a pass of the reference and of the model, batch by batch."""
    activity, clock, teller, lines = made()
    with activity.phase("evaluating"):
        for _ in range(8):
            with activity.phase("log_probs"):
                clock.seconds += 5.0
                teller.look()
    assert lines == ["evaluating, 30 s"]


def test_between_phases_there_is_nothing_to_say():
    activity, _, teller, lines = made()
    teller.look()
    assert str(activity) == "" and lines == []


def test_samples_that_a_thread_makes_are_told_apart_from_what_the_trainer_does():
    activity, _, _, _ = made()
    told = []

    def generate() -> None:
        with activity.counting(8, "samples") as came:
            came(5)
            told.append(str(activity))

    for title in ("update", "generate"):
        with activity.phase(title, 2):
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()
    assert told == ["step 2: update, 0 s; 5/8 samples ahead", "step 2: generate 5/8 samples, 0 s"]


def test_a_thread_tells_and_ends():
    activity, clock, _, _ = made()
    came = threading.Event()
    with activity.phase("save", 1):
        clock.seconds = 31.0
        with Teller(lambda line: came.set(), activity).told():
            assert came.wait(60)
    assert not [t for t in threading.enumerate() if t.name == "tells-phases"]
