"""The config in force, shared by all threads and graphs of a backend."""

import logging
import threading

from skip_attn_compile.config import SkipConfig

log = logging.getLogger(__name__)


class Settings:
    """`version` tells a graph that its control rows are out of date."""

    def __init__(self, config: SkipConfig, warns: bool = True) -> None:
        self.config = config
        self._warns = warns
        self.version = 0
        self._warned: set[tuple[object, ...]] = set()
        self._lock = threading.Lock()

    def update(self, config: SkipConfig) -> None:
        with self._lock:
            self.config = config
            self.version += 1

    def warn_once(self, message: str, *args: object, key: tuple[object, ...] | None = None) -> None:
        """One warning for each message and `key`, which is the arguments unless given."""
        identity = (message, *(args if key is None else key))
        with self._lock:
            if identity in self._warned:
                return
            self._warned.add(identity)
        if self._warns:
            log.warning(message, *args)
