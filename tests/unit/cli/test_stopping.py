"""Signals that stop a command which runs until it is told to."""

import signal

import pytest

from ops.stopping import SIGNALS, StopSignal, clearing_up, stops_by_signal


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_the_block_and_later_ones_dont_disturb_the_clearing_up(number: signal.Signals) -> None:
    former = [signal.getsignal(each) for each in SIGNALS]
    cleared = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for each in SIGNALS:
                signal.raise_signal(each)
                cleared.append(each)

    with stops_by_signal(), pytest.raises(StopSignal):
        work()
    assert cleared == list(SIGNALS)
    assert [signal.getsignal(each) for each in SIGNALS] == former


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stops_by_signal():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_nothing_is_heard_once_all_that_is_left_is_clearing_up() -> None:
    with stops_by_signal():
        clearing_up()
        signal.raise_signal(signal.SIGINT)
