"""Who is let in: only with the right host, the token and from our own pages; and what browsers are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.clients import BASE, PORT, TOKEN, Client
from tests.dashboard.parsed import check_harmless

PAGES = ("/", "/runs", "/run?name=runs/done", "/budget", "/audit", "/static/app.js", "/static/style.css", "/nowhere")


@pytest.fixture
def stranger(folder: Path) -> Client:
    return Client(folder)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_without_the_token(stranger: Client, page: str) -> None:
    for cookie in ("", "wrong", TOKEN[:-1], "ä"):
        headers = {"cookie": f"cpsgd-{PORT}={cookie}".encode()} if cookie else {}
        answer = stranger.get(page, headers=headers)
        assert answer.status_code == 403
        assert "runs/done" not in answer.text
    assert stranger.get(page, params={"token": "wrong"}).status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: Client) -> None:
    answer = stranger.get("/run", params={"token": TOKEN, "name": "runs/done"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?name=runs%2Fdone")
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", f"cpsgd-{PORT}={TOKEN}"):
        assert part in cookie
    assert stranger.get("/run", params={"name": "runs/done"}).status_code == 200


def test_the_way_on_never_leads_elsewhere(stranger: Client) -> None:
    for path in ("//evil.example", "/\\evil.example", "///evil.example"):
        place = stranger.get(f"{BASE}{path}?token={TOKEN}").headers["location"]
        assert place.startswith("/")
        assert not place.startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", "", "127.0.0.1:8000.evil"]
)
def test_another_host_is_refused_even_with_the_token(client: Client, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 421


def test_two_hosts_are_none(client: Client) -> None:
    own = "127.0.0.1:8000"
    assert client.get("/", headers=[("host", own), ("host", "evil.example")]).status_code == 421
    assert client.get("/", headers=[("host", own)]).status_code == 200


def test_localhost_is_this_host(client: Client) -> None:
    assert client.get("/", headers={"host": f"localhost:{PORT}", "cookie": f"cpsgd-{PORT}={TOKEN}"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(client: Client, method: str) -> None:
    assert client.request(method, "/runs").status_code == 405


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_others_cannot_ask(client: Client, site: str) -> None:
    assert client.get("/runs", headers={"sec-fetch-site": site}).status_code == 403
    for ours in ("same-origin", "none"):
        assert client.get("/runs", headers={"sec-fetch-site": ours}).status_code == 200


@pytest.mark.parametrize("page", PAGES)
def test_browsers_are_told_to_run_nothing_but_our_script(client: Client, stranger: Client, page: str) -> None:
    for answer in (client.get(page), stranger.get(page)):
        policy: dict[str, Any] = dict(
            part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_pages_have_no_script_of_their_own(client: Client) -> None:
    for page in PAGES[:5]:
        text = client.get(page).text
        check_harmless(text)
        assert "<style" not in text
