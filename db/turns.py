"""A fair lock: threads get it in the order of their requests."""

import threading
from collections import deque


class Turns:
    """Fair lock that may be released by another thread than its holder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting = deque[threading.Event]()

    @property
    def waiting(self) -> int:
        """Number of waiting threads."""
        return len(self._waiting)

    def take(self, timeout: float) -> bool:
        """Acquire the lock; return False if that takes longer than `timeout` seconds."""
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
        """Release the lock to the thread that has waited longest; any thread may do so."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
