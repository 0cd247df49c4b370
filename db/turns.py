"""Turns of threads with a lock that is polled otherwise: first come, first served."""

import threading
from collections import deque


class Turns:
    """Hands one turn from thread to thread, in the order in which they asked for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting = deque[threading.Event]()

    @property
    def waiting(self) -> int:
        """How many threads wait for a turn."""
        return len(self._waiting)

    def take(self, timeout: float) -> bool:
        """Wait for a turn and return True, or False after `timeout` seconds without one."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            handed = threading.Event()
            self._waiting.append(handed)
        if handed.wait(timeout):
            return True
        with self._lock:
            if handed.is_set():  # in the meantime
                return True
            self._waiting.remove(handed)
            return False

    def give_back(self) -> None:
        """Hand the turn to the thread that has waited longest; any thread may do so."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
