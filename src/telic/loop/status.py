"""What a handler may answer, by severity."""

import enum


class Status(enum.IntEnum):
    """A handler's answer; of several answers to one firing the severest holds."""

    CONTINUE = 0
    HALT_EPOCH = 1
    HALT_LOOP = 2


CONTINUE = Status.CONTINUE
"""Go on. The same as returning nothing."""

HALT_EPOCH = Status.HALT_EPOCH
"""Close this epoch, record its metrics, go on with the next."""

HALT_LOOP = Status.HALT_LOOP
"""Close this epoch, record its metrics, end the run."""
