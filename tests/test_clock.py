"""Seconds by stage, of a host and of a device that runs behind it."""

import time

import pytest

from cpbkit.runs.clock import Clock


class Device:
    """A device with a queue: work is given to it at once, and done later."""

    def __init__(self):
        self.now = self.through = 0.0  # seconds: of the host; when the device has done all it was given

    def give(self, seconds):
        self.through = max(self.through, self.now) + seconds

    def wait(self):
        self.now = max(self.now, self.through)

    def moment(self):
        return Event(self, max(self.now, self.through))


class Event:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def query(self):
        return self.at <= self.device.now

    def elapsed_time(self, later):
        assert self.query() and later.query(), "torch refuses the time of an event that has not passed"
        return 1e3 * (later.at - self.at)


def test_each_stage_is_charged_what_the_device_did_for_it():
    device = Device()
    clock, taken = Clock(device.moment), []
    for _ in range(2):
        for step in range(50):
            with clock("epochs"):
                device.give(0.07)
                device.now += 0.0004  # the host is through with an epoch long before the device
            if step == 25:
                taken.append(clock.take())
        with clock("validation"):
            device.give(0.25)
            device.wait()  # its losses are looked at
        with clock("judging"):
            device.now += 0.5  # on the host alone
    taken.append(clock.take())
    total = {stage: sum(one.get(stage, 0) for one in taken) for stage in ("epochs", "validation", "judging")}
    assert total == pytest.approx({"epochs": 7.0, "validation": 0.5, "judging": 1.0})


def test_the_innermost_stage_gets_the_seconds_of_the_host():
    clock = Clock()
    with clock("outer"):
        with clock("inner"):
            time.sleep(0.05)
    seconds = clock.take()
    assert seconds["inner"] >= 0.05 > seconds["outer"] and clock.take() == {}
