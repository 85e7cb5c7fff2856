"""The stages of a round."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """What comes next. The value is the name of the client's method that answers the server's message."""

    INVITE = "invite"
    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"
    DONE = "done"
