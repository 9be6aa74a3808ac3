import os
from pathlib import Path


def library() -> Path:
    return Path(os.environ["SKIP_ATTN_COMPILE_LIBRARY"])


def unavailable() -> str | None:
    return None
