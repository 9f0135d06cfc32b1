"""The probe of single words at set-up: silent where words are whole, and not where a transport tears them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from local_link import Mailbox

from pyddl.link.probe import SyncerProbe, probe_as_learner


class Tearing:
    """A window in whose words the two halves come from different writes, one way or the other."""

    def __init__(self, window: object, where: str) -> None:
        self._window, self._where, self._last = window, where, 0

    def get(self, offset: int, out: np.ndarray) -> object:
        operation = self._window.get(offset, out)
        if self._where == "get":
            operation.test = self._torn(operation.test, out)
        return operation

    def _torn(self, test: object, out: np.ndarray) -> object:
        def test_and_tear() -> bool:
            done = test()
            if done and out.view(np.uint64)[0]:
                out[4:] ^= 0xFF
            return done

        return test_and_tear

    def write_word(self, offset: int, value: int) -> None:
        if self._where == "write" and value:
            value ^= 0xFFFFFFFF
        self._window.write_word(offset, value)

    def flush(self) -> None:
        self._window.flush()


def probe(window: object, probe: SyncerProbe, up: int) -> int:
    """Both sides, the learner's in a thread; what both have found."""
    found: list[int] = []
    learner = threading.Thread(target=lambda: found.append(probe_as_learner(window, up, 0)), daemon=True)
    learner.start()
    deadline_s = time.monotonic() + 60
    while learner.is_alive() and time.monotonic() < deadline_s:
        probe.turn()
        time.sleep(0.0002)  # else the learner's thread waits for the interpreter's lock
    probe.end()
    assert found, "the learner's side must come to its end"
    return found[0] + probe.torn


def test_probe_of_whole_words_finds_nothing_and_leaves_the_mailbox_as_it_was():
    box = Mailbox(num_tests=0, beating=False)
    before = box.memory.copy()
    assert probe(box.windows[0], box.port.new_probe(), box.geometry.heartbeat_word(0)) == 0
    np.testing.assert_array_equal(box.memory, before)


@pytest.mark.parametrize("where", ["get", "write"])
def test_probe_sees_words_that_are_torn_either_way(where: str):
    box = Mailbox(num_tests=0, beating=False)
    window = Tearing(box.windows[0], where)
    assert probe(window, box.port.new_probe(), box.geometry.heartbeat_word(0)) > 10
