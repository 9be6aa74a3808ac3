"""The config in force, shared by all threads and graphs of a backend."""

import logging
import threading

from skip_attn_compile.config import SkipConfig

log = logging.getLogger(__name__)


class Settings:
    """`version` tells a graph that its control rows are out of date."""

    def __init__(self, config: SkipConfig) -> None:
        self.config = config
        self.version = 0
        self._warned: set[tuple[object, ...]] = set()
        self._lock = threading.Lock()

    def update(self, config: SkipConfig) -> None:
        with self._lock:
            self.config = config
            self.version += 1

    def warn_once(self, message: str, *args: object) -> None:
        """One warning for each message and arguments."""
        with self._lock:
            if (message, *args) in self._warned:
                return
            self._warned.add((message, *args))
        log.warning(message, *args)
