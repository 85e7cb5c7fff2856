"""The two servers of a task, as they say that they are: progress of the open round, figures, and all rounds.

Only servers of a task that the dashboard was started with are asked. What they answer is bounded, checked and escaped:
each server is run by somebody else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from cpsgd.engines.pair.parties import trusted
from cpsgd.engines.pair.store import Verdict
from cpsgd.engines.pair.task import PairTask, check_address
from cpsgd.errors import DataError

# Seconds that a server may take, bytes of its answer, and rounds that are listed.
_PATIENCE, _LARGEST, _LISTED = 5.0, 1 << 16, 100
_STATES = ("open", "closed", "revealed")


@dataclass(frozen=True)
class RoundRow:
    """A round as both servers have it; None where a server does not know of it."""

    number: int
    leader: dict[str, Any] | None
    helper: dict[str, Any] | None

    @property
    def differs(self) -> bool:
        """Whether both servers closed the round with different numbers of reports, so that it yields no mean."""
        both = (self.leader, self.helper)
        ended = [each for each in both if each is not None and each["state"] != "open"]
        return len(ended) == 2 and ended[0]["accepted"] != ended[1]["accepted"]


@dataclass(frozen=True)
class ServerView:
    """One server: its address, and its progress or why there is none."""

    role: str
    place: str
    progress: dict[str, Any] | None = None
    failed: str = ""

    @property
    def open_round(self) -> dict[str, Any] | None:
        """The counts of the open round, zero before its first report; None if no round is open."""
        if self.progress is None or self.progress["round"] is None:
            return None
        empty = {"round": self.progress["round"], "state": "open", "accepted": 0, "refused": 0}
        return next((each for each in self.progress["states"] if each["round"] == self.progress["round"]), empty)

    @property
    def refusals(self) -> list[tuple[str, int]]:
        """Verdicts other than accepted since the server started, with their numbers, the most frequent first."""
        counts = {} if self.progress is None else self.progress["verdicts"]
        found = [(name.replace("_", " "), count) for name, count in counts.items() if name != "accepted"]
        return sorted(found, key=lambda each: -each[1])


@dataclass(frozen=True)
class PairWatch:
    """A task whose servers are watched.

    Attributes:
        task: The task.
        ca: Certificates that the servers' must be signed by; the system's if not given.
        insecure: Asks also at http addresses of other machines.
    """

    task: PairTask
    ca: Path | None = None
    insecure: bool = False

    async def look(self) -> dict[str, Any]:
        """Asks both servers at the same time, and returns the data of the page."""
        servers = await asyncio.gather(self._ask("leader"), self._ask("helper"))
        known = [
            {} if each.progress is None else {state["round"]: state for state in each.progress["states"]}
            for each in servers
        ]
        numbers = sorted({number for states in known for number in states}, reverse=True)[:_LISTED]
        return {
            "task": self.task,
            "servers": servers,
            "rounds": [RoundRow(number, known[0].get(number), known[1].get(number)) for number in numbers],
            "looked": time.strftime("%H:%M:%S"),
        }

    async def _ask(self, role: Any) -> ServerView:
        url = self.task.endpoint(role).url
        place = urlsplit(url).netloc.rpartition("@")[2]
        try:
            check_address(url, insecure=self.insecure)
            async with asyncio.timeout(_PATIENCE):
                return ServerView(role, place, checked(await self._fetched(url), self.task, role))
        except (httpx.HTTPError, OSError) as error:  # a time that is out is an OSError
            return ServerView(role, place, failed=f"It does not answer ({type(error).__name__}).")
        except ValueError as error:
            return ServerView(role, place, failed=str(error))

    async def _fetched(self, url: str) -> object:
        """Returns the JSON of a server's answer.

        Raises:
            DataError: It is too long, or something else.
        """
        verify = trusted(self.ca) if url.startswith("https") else False
        async with (
            httpx.AsyncClient(verify=verify, trust_env=False, timeout=_PATIENCE) as client,
            client.stream("GET", url + "/") as answer,
        ):
            data = bytearray()
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > _LARGEST:
                    raise DataError("Its answer is too long.")
        try:
            return json.loads(data.decode()) if answer.status_code == 200 else None
        except (ValueError, RecursionError):
            raise DataError("Its answer is not JSON.") from None


def checked(found: object, task: PairTask, role: str) -> dict[str, Any]:
    """Returns the progress in a server's answer, if it is valid for this task and role.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(found, dict) or (found.get("task"), found.get("role")) != (task.id.hex(), role):
        raise DataError(f"It is not this task's {role}.")
    states, verdicts = found.get("states"), found.get("verdicts")
    names = {verdict.name.lower() for verdict in Verdict}
    number = found.get("round")
    good = (
        (number is None or _is_count(number, task.rounds - 1))
        and isinstance(states, list)
        and len(states) <= _LISTED
        and all(_is_state(each, task) for each in states)
        and isinstance(verdicts, dict)
        and all(name in names and _is_count(count) for name, count in verdicts.items())
        and _is_count(found.get("waiting"))
        and all(_is_amount(found.get(name)) for name in ("per_second", "busy_seconds", "seconds"))
    )
    if not good:
        raise DataError("Its answer is none of this release's.")
    return found


def _is_state(each: object, task: PairTask) -> bool:
    return (
        isinstance(each, Mapping)
        and _is_count(each.get("round"), task.rounds - 1)
        and each.get("state") in _STATES
        and _is_count(each.get("accepted"))
        and _is_count(each.get("refused"))
    )


def _is_count(found: object, most: int = 2**53) -> bool:
    return type(found) is int and 0 <= found <= most


def _is_amount(found: object) -> bool:
    return type(found) in (int, float) and 0 <= found <= 2**53  # type: ignore[operator]
