"""Progress on stderr: tqdm's bar where tqdm is installed, else a line for each step that is done."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int, *, done: int = 0, show: bool = True) -> Iterator[Callable[[str], object]]:
    """Yields the function that tells, with a note on it or "", that one more of `total` steps is done."""
    if not show:
        yield lambda note: None
        return
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield _lines(title, total, done)
        return
    with tqdm(initial=done, total=total, desc=title) as bar:

        def advance(note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update()

        yield advance


def _lines(title: str, total: int, done: int) -> Callable[[str], object]:
    start, count = time.monotonic(), done

    def advance(note: str) -> None:
        nonlocal count
        count += 1
        print(f"{title}: {count} of {total}, {time.monotonic() - start:.0f} s" + f", {note}" * bool(note), file=sys.stderr, flush=True)

    return advance
