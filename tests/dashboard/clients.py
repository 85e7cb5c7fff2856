"""A client of an application in this process, which keeps its cookies as a browser does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from cpsgd.dashboard.folder import Folder
from cpsgd.dashboard.web import Dashboard

TOKEN, PORT = "right-token", 8000
BASE = f"http://127.0.0.1:{PORT}"


class Client:
    """Asks a dashboard of a folder; `dashboard` is what answers."""

    def __init__(self, folder: Path) -> None:
        self.dashboard = Dashboard(Folder.at(folder))
        self._app = self.dashboard.app(token=TOKEN, port=PORT)
        self._cookies = httpx.Cookies()

    def get(self, place: str, **options: Any) -> httpx.Response:
        """The answer, whole; redirections are not followed."""
        return self.request("GET", place, **options)

    def request(self, method: str, place: str, **options: Any) -> httpx.Response:
        """The answer to any method."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)  # type: ignore[arg-type]  # httpx has a wider type of its own
            async with httpx.AsyncClient(transport=transport, base_url=BASE, cookies=self._cookies) as client:
                answer = await client.request(method, place, **options)
                self._cookies = client.cookies
                return answer

        return asyncio.run(asked())


def admitted(folder: Path) -> Client:
    """A client that has opened the address with the token."""
    client = Client(folder)
    assert client.get("/", params={"token": TOKEN}).status_code == 303
    return client
