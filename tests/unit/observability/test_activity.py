"""Lines about long phases, their progress, and the times of phases."""

import threading
import time

from mcore_rl.observability.activity import FIRST_REPORT_S, Activity, SlowPhaseReporter, Stopwatch


class Time:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_reporter() -> tuple[Activity, Time, SlowPhaseReporter, list[str]]:
    clock, lines = Time(), list[str]()
    activity = Activity(clock)
    return activity, clock, SlowPhaseReporter(lines.append, activity), lines


def test_a_long_phase_has_lines_at_growing_intervals():
    activity, clock, reporter, lines = make_reporter()
    with activity.enter_phase("generate", 12), activity.count(512, "samples") as update:
        for second in range(260):
            clock.seconds = 100.0 + second if second else 0.0
            update(second)
            reporter.report_if_due()
    assert [line.split(", ")[1] for line in lines] == ["101 s", "120 s", "240 s"]
    assert lines[1] == "step 12: generate 20/512 samples, 120 s"


def test_the_reporter_sleeps_until_a_line_may_be_due():
    activity, clock, reporter, lines = make_reporter()
    assert reporter.report_if_due() == FIRST_REPORT_S  # what begins now is due no earlier
    clock.seconds = 10.0
    with activity.enter_phase("update", 3):
        clock.seconds = 12.0
        assert reporter.report_if_due() == FIRST_REPORT_S - 2
        clock.seconds = 41.0
        assert reporter.report_if_due() == 60 - 31
    assert lines == ["step 3: update, 31 s"]


def test_each_phase_is_timed_anew():
    activity, clock, reporter, lines = make_reporter()
    for step in (1, 2):
        with activity.enter_phase("update", step):
            clock.seconds += 29.0
            reporter.report_if_due()
    assert lines == []


def test_short_phases_inside_of_a_long_one_do_not_hide_it():
    activity, clock, reporter, lines = make_reporter()
    with activity.enter_phase("evaluating"):
        for _ in range(8):
            with activity.enter_phase("log_probs"):
                clock.seconds += 5.0
                reporter.report_if_due()
    assert lines == ["evaluating, 30 s"]


def test_between_phases_there_is_nothing_to_say():
    activity, _, reporter, lines = make_reporter()
    reporter.report_if_due()
    assert str(activity) == "" and lines == []


def test_samples_of_a_background_thread_are_shown_beside_the_phase():
    activity, _, _, _ = make_reporter()
    texts = []

    def generate() -> None:
        with activity.count(8, "samples") as update:
            update(5)
            texts.append(str(activity))

    for title in ("update", "generate"):
        with activity.enter_phase(title, 2):
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()
    assert texts == ["step 2: update, 0 s; 5/8 samples ahead", "step 2: generate 5/8 samples, 0 s"]


def test_a_background_thread_reports_and_ends():
    activity, clock, _, _ = make_reporter()
    is_reported = threading.Event()
    with activity.enter_phase("save", 1):
        clock.seconds = 31.0
        with SlowPhaseReporter(lambda line: is_reported.set(), activity).run_in_background():
            assert is_reported.wait(60)
    assert not [t for t in threading.enumerate() if t.name == "slow-phases"]


def test_cpu_time_of_the_driver_is_of_all_its_threads():
    """Threads that generate beside a trainer count, also in the share of a core."""

    def compute() -> None:
        while time.thread_time() < 0.2:
            pass

    clock = Stopwatch()
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver, total_s = clock.driver, clock.total_s
    assert driver["driver/cpu_s"] >= 0.4
    assert 0.9 < driver["driver/cpu_share"] * total_s / driver["driver/cpu_s"] < 1.1


def test_cpu_time_of_the_driver_counts_computation_without_waits():
    clock = Stopwatch()
    with clock("waits"):
        time.sleep(0.3)
    before = clock.driver
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = clock.driver
    assert clock.seconds["time/waits_s"] >= 0.3
    assert before["driver/cpu_s"] < 0.15
    assert after["driver/cpu_s"] - before["driver/cpu_s"] >= 0.2
    assert before["driver/cpu_share"] < after["driver/cpu_share"] < 1.5
