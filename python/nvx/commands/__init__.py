"""The commands that are not modules of their own, one file each."""

import contextlib


class Refused(Exception):
    """A command cannot do what was requested. `nvx` prints the text, and ends with 2."""


@contextlib.contextmanager
def refusing(*kinds):
    """Turns these exceptions into Refused."""
    try:
        yield
    except kinds as error:
        raise Refused(str(error).removeprefix("nvx: ")) from error
