"""One row of the tables of serve's flags."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zlm.cli import values
from zlm.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A flag. Without ``metavar`` it is a switch: ``--x`` and ``--no-x``."""

    flag: str
    field: str  # dotted path in Config
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] = values.switch
    spellings: tuple[str, ...] = ()  # other names of the flag
    off: tuple[str, ...] = ()  # other names of the switch's --no- form
    default: str = ""  # what help says of the default; else it is read from Config
    takes: str = "one"  # one value; "words": all up to the next flag; "repeats": one each time

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    def value_in(self, config: Config) -> Any:
        """Return what *config* has in this flag's field."""
        value: Any = config
        for name in self.field.split("."):
            value = getattr(value, name)
        return value
