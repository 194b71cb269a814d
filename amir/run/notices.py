"""What the libraries warn of during a run, each text once, for the terminal and log.txt."""

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator

from transformers.utils import logging as transformers_logging

from ..errors import shortened

LONGEST, LONGEST_BESIDE_AN_ERROR = 2000, 300
"""Characters of a warning, in a run and before the message of a run that is refused."""
DEPRECATION = re.compile(r"\bdeprecat", re.IGNORECASE)
"""Such notices are for the callers of a library, which its user is not."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Notices(logging.Handler):
    """Takes the warnings of libraries. They are kept until `pass_to` says where they go."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[str, None] = {}
        self._log: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record of a library's logger; notices of deprecation are left out."""
        message = record.getMessage()
        if not DEPRECATION.search(message):
            self.take(f"{record.name.partition('.')[0]}: {message}")

    def take(self, text: str) -> None:
        """Takes a warning, as one line; notices of deprecation, and a text that was taken before, are left out."""
        line = shortened(" ".join(ANSI.sub("", text).split()), LONGEST)
        if line in self._texts or "deprecated" in line:
            return
        self._texts[line] = None
        if self._log is not None:
            self._log(line)

    def pass_to(self, log: Callable[[str], None]) -> None:
        """From now on, and for all that was taken before, warnings go to `log`."""
        self._log = log
        for line in self._texts:
            log(line)

    def pass_rest_to(self, log: Callable[[str], None]) -> None:
        """What was taken goes to `log`, in short, unless `pass_to` was called: refused runs have warnings too."""
        if self._log is None:
            self.pass_to(lambda line: log(shortened(line, LONGEST_BESIDE_AN_ERROR)))


@contextlib.contextmanager
def library_notices() -> Iterator[Notices]:
    """While active, warnings of Python and of every library's logger are taken; notices of deprecation are left out."""
    notices = Notices()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logging.getLogger().addHandler(notices)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft|torch")
            warnings.showwarning = lambda message, category, *place: notices.take(f"{category.__name__}: {message}")
            yield notices
    finally:
        logging.getLogger().removeHandler(notices)
        transformers_logging.disable_propagation()
        transformers_logging.enable_default_handler()
