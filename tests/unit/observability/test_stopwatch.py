import time

from mcore_rl.observability.stopwatch import Stopwatch


def test_what_a_driver_computes_counts_and_its_waits_do_not():
    clock = Stopwatch()
    with clock("waits"):
        time.sleep(0.3)
    waited = clock.driver
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    found = clock.driver
    assert clock.seconds["time/waits_s"] >= 0.3
    assert waited["driver/cpu_s"] < 0.15
    assert found["driver/cpu_s"] - waited["driver/cpu_s"] >= 0.2
    assert waited["driver/cpu_share"] < found["driver/cpu_share"] < 1.5
