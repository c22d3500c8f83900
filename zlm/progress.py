"""The progress bar of offline runs. Owns the bar; knows counts, not what is counted."""

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm


class ProgressBar:
    """A progress bar over prompts that shows generated tokens a second."""

    REFRESH_SECONDS = 0.25

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        wanted = bool(use_tqdm) and total > 0
        self._bar = make(total=total, desc="Processed prompts", unit="prompt") if wanted else None
        self._start = self._shown = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.close()

    def advance(self, prompts: int, tokens: int) -> None:
        """Count *prompts* more that are done and *tokens* more that were generated."""
        self._tokens += tokens
        if self._bar is None:
            return
        if prompts:
            self._bar.update(prompts)
        if time.monotonic() - self._shown >= self.REFRESH_SECONDS:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None
        self._shown = time.monotonic()
        rate = self._tokens / max(self._shown - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} output tokens/s")
