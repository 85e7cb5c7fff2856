"""Sends messages to nodes and collects the replies, so that no node can stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import getLogger

from flwr.app import Message
from flwr.serverapp import Grid

_POLL_SECONDS = 0.5
_log = getLogger("flwr")

Dropped = Callable[[int, str], None]
"""Is told a node's number and why it is out of the round."""


def exchange(grid: Grid, messages: Mapping[int, Message], timeout: float, dropped: Dropped) -> dict[int, Message]:
    """The replies of the nodes that answer within `timeout` seconds, by node.

    Replies are fetched one at a time: one that Flower itself cannot read must not cost the others theirs.
    """
    waiting: dict[str, int] = {}
    for node, message in messages.items():
        identifier = next(iter(grid.push_messages([message])), None)
        if identifier:
            waiting[identifier] = node
        else:
            dropped(node, "Flower could not take the message")
    replies: dict[int, Message] = {}
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for identifier, node in list(waiting.items()):
            try:
                found = list(grid.pull_messages([identifier]))
            except Exception as error:
                # What a stranger can make Flower's decoder raise is anybody's guess; the text may be theirs, too.
                _log.warning("A reply of node %d cannot be read (%s).", node, type(error).__name__)
                dropped(node, "its reply cannot be read")
                del waiting[identifier]
                continue
            if not found:
                continue
            del waiting[identifier]
            if found[0].has_error():
                dropped(node, _shown(found[0].error.reason))
            else:
                replies[node] = found[0]
        if waiting:
            time.sleep(_POLL_SECONDS)
    for node in waiting.values():
        dropped(node, "no answer in time")
    return replies


def _shown(text: str | None) -> str:
    """The last line of a stranger's text, fit for a log; Flower's simulation puts a traceback before it."""
    lines = [line for line in (text or "").splitlines() if line.strip()]
    return "".join(letter for letter in (lines[-1] if lines else "an error")[:300] if letter.isprintable())
