"""Files that are written whole or not at all, and of which it is known before long work whether they can be."""

import os
from pathlib import Path


def check_writable(what: str, path: Path) -> None:
    """ValueError in the name of `what` where no file can be written at `path`; makes its folder."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        _part(path).touch()
        _part(path).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{what} must be a file that can be written, got {str(path)!r}: {error}; give another path") from error


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _part(path).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _part(path).replace(path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")  # one name: what a killed process left is written over
