"""The dashboard in a real browser: it answers, changes by itself, fits a telephone, and runs nothing else."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from cpsgd.dashboard import run_view
from cpsgd.dashboard.folder import Folder
from cpsgd.dashboard.pair_page import PairWatch
from cpsgd.dashboard.serving import HOST, prepare
from cpsgd.engines.pair.parties import Collector, Sender
from tests.dashboard.samples import metrics, write_all, write_hostile
from tests.engines.pair.local import DIM
from tests.engines.pair.processes import Servers, servers

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium with its driver (on Debian: apt-get install chromium chromium-driver)",
    ),
]
TABS = ("/", "/runs", "/run?name=runs/done", "/budget", "/audit", "/pair")
SWITCHES = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars"),
)
ASKED = "/?clients=10000&dim=65536&bits=4&epsilon=2"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("shown"))
    write_hostile(folder / "hostile")
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture(scope="module")
def address(shown: Path, pair: Servers) -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        server, address = prepare(Folder.at(shown), listening, PairWatch(pair.task))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield address
        server.handle_exit(signal.SIGTERM, None)
        thread.join()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    profile = tempfile.mkdtemp()
    for switch in (*SWITCHES, f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(address)
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def visit(browser: webdriver.Chrome, address: str) -> Iterator[Callable[..., webdriver.Chrome]]:
    """Opens a page in a width and a colour scheme. In the end nothing may have been complained about."""

    def to(place: str, width: int = 1280, scheme: str = "light") -> webdriver.Chrome:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(address.partition("/?")[0] + place)
        return browser

    complaints(browser)
    yield to
    assert complaints(browser) == []


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the browser has complained about since it was last asked."""
    entries = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def check_width(page: webdriver.Chrome) -> None:
    """Nothing is wider than a page of 360 pixels, once the browser has found out how wide it is itself."""
    until(lambda: page.execute_script("return document.documentElement.scrollWidth") <= 360, seconds=5.0)


def text_of(page: webdriver.Chrome, selector: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def test_the_token_does_not_stay_in_the_address(visit: Any) -> None:
    page = visit("/")
    assert "token" not in page.current_url
    assert page.execute_script("return document.cookie") == ""  # no script can read it


def test_a_plan_follows_the_slider(visit: Any) -> None:
    page = visit(ASKED)
    until(lambda: "bits per coordinate" in text_of(page, "#plan"))
    until(lambda: text_of(page, "#copy-json"))
    assert json.loads(text_of(page, "#copy-json"))["clients"] == 10_000
    assert page.find_elements(By.CSS_SELECTOR, "#frontier svg .mark")
    slider = page.find_element(By.CSS_SELECTOR, 'input[data-for="epsilon"]')
    before = page.find_element(By.ID, "epsilon").get_attribute("value")
    slider.send_keys(*[Keys.ARROW_LEFT] * 60)
    after = page.find_element(By.ID, "epsilon").get_attribute("value")
    assert 0.1 <= float(after) < float(before)
    assert slider.get_attribute("aria-valuetext") == after
    until(lambda: f"epsilon={after}" in page.current_url)
    until(lambda: f"--epsilon {after} " in text_of(page, "#copy-command"))
    until(lambda: f'"epsilon": {after},' in text_of(page, "#copy-json"))
    assert "Promise" in text_of(page, "#proof")


def test_what_makes_no_sense_is_said_at_once(visit: Any) -> None:
    page = visit(ASKED)
    field = page.find_element(By.ID, "clients")
    field.clear()
    field.send_keys("many")
    until(lambda: "Expected clients to be a number." in text_of(page, "#plan"))


def test_the_share_is_asked_for_only_where_clients_are_drawn(visit: Any) -> None:
    page = visit(ASKED)
    rate = page.find_element(By.ID, "rate")
    assert not rate.is_displayed()
    page.find_element(By.CSS_SELECTOR, "#scheme option[value=once]").click()
    assert not rate.is_displayed()
    page.find_element(By.CSS_SELECTOR, "#scheme option[value=fixed-size]").click()
    assert rate.is_displayed()


def test_a_run_changes_while_it_is_looked_at(visit: Any, shown: Path) -> None:
    page = visit("/run?name=runs/going")
    page.find_element(By.CSS_SELECTOR, "#live summary").click()
    with (shown / "runs" / "going" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(4)) + "\n")
    until(lambda: "round 5 of 10" in text_of(page, "#live-state"))
    # What was opened stays open, and has the new number.
    details = page.find_element(By.CSS_SELECTOR, "#live details")
    assert details.get_attribute("open") is not None
    assert "round 5" in details.text


def test_two_servers_are_watched_as_reports_come_and_when_one_is_gone(visit: Any, pair: Servers) -> None:
    page = visit("/pair")
    assert "0 reports of at least 8" in text_of(page, "#leader")
    for index in range(9):
        with Sender(pair.task) as sender:
            sender.send([0.1] * DIM, 0)
        if index == 6:
            for role in ("leader", "helper"):
                until(lambda role=role: "7 reports of at least 8" in text_of(page, f"#{role}"))  # type: ignore[misc]
    with Collector(pair.task, pair.secrets["collector"]) as collector:
        collector.collect(0)
    until(lambda: "round 2 of 2" in text_of(page, "#helper"))
    # In one go: the page may renew the row meanwhile.
    cells = page.execute_script(
        "return [...document.querySelectorAll('#live tbody tr:last-child > *')].map(cell => cell.innerText)"
    )
    assert cells == ["1", "revealed", "9", "0", "revealed", "9", "0"]
    pair.stop("helper")
    until(lambda: "does not answer" in text_of(page, "#helper"))
    assert "round 2 of 2" in text_of(page, "#leader")
    pair.start("helper")
    until(lambda: "round 2 of 2" in text_of(page, "#helper"))


def test_numbers_appear_where_one_points(visit: Any) -> None:
    page = visit("/run?name=runs/done")
    column = page.find_elements(By.CSS_SELECTOR, "#live-charts svg.only .column")[1]
    tip = column.find_element(By.CSS_SELECTOR, ".tip")
    assert not tip.is_displayed()
    strip = column.find_element(By.CSS_SELECTOR, ".strip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", strip)
    webdriver.ActionChains(page).move_to_element(strip).perform()
    assert tip.is_displayed()
    assert "private 25 %" in tip.text


@pytest.mark.parametrize("place", TABS)
def test_nothing_is_wider_than_a_telephone(visit: Any, place: str) -> None:
    page = visit(place, width=360)
    check_width(page)
    size = """return Math.min(...[...document.querySelectorAll("svg.small text, svg.only text")]
        .filter((text) => text.getBoundingClientRect().width)
        .map((text) => 12 * text.getScreenCTM().a))"""
    found = page.execute_script(size)
    assert found is None or found >= 10.0  # pixels of the letters in charts


CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(visit: Any, scheme: str) -> None:
    for place in TABS:
        page = visit(place, scheme=scheme)
        assert page.execute_script(CONTRAST) == []


def test_colours_can_be_chosen_and_are_remembered(visit: Any) -> None:
    def paper(page: webdriver.Chrome) -> str:
        return str(page.execute_script("return getComputedStyle(document.body).backgroundColor"))

    page = visit("/runs")
    bright = paper(page)
    page.execute_script("document.getElementById('theme-dark').click()")
    dark = paper(page)
    assert dark != bright
    assert paper(visit("/audit")) == dark
    page.execute_script("document.getElementById('theme-auto').click()")
    assert paper(visit("/runs")) == bright
    assert paper(visit("/runs", scheme="dark")) == dark


def test_the_keyboard_gets_everywhere(visit: Any) -> None:
    page = visit("/runs")
    first = page.switch_to.active_element
    first.send_keys(Keys.TAB)
    assert page.switch_to.active_element.get_attribute("class") == "skip"
    seen = []
    for _ in range(12):
        page.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(page.switch_to.active_element)
    assert [each.text for each in seen[:5]] == ["Planner", "Runs", "Budget", "Audit", "Pair"]
    assert {"checkbox", "radio"} <= {each.get_attribute("type") for each in seen}


def unnamed(page: Any) -> list[str]:
    """The controls that are shown without a name. What is hidden has none; the field for the share, for one."""
    controls = page.find_elements(By.CSS_SELECTOR, "input, select, button, a[href], summary")
    shown = [each for each in controls if page.execute_script("return arguments[0].checkVisibility()", each)]
    return [each.get_attribute("outerHTML") for each in shown if not each.accessible_name]


def test_every_control_has_a_name(visit: Any) -> None:
    for place in TABS:
        # A page that follows a run may renew a control while it is looked at; then all are looked at again.
        patient = WebDriverWait(visit(place), 30, ignored_exceptions=[StaleElementReferenceException])
        assert patient.until(lambda page: (unnamed(page),)) == ([],)


def test_a_hostile_folder_runs_nothing(visit: Any, shown: Path) -> None:
    (name,) = (name for name in Folder.at(shown).runs() if name.startswith("hostile"))
    for place in (f"/run?name={quote(name)}", "/runs", "/budget", "/audit"):
        page = visit(place)
        assert "window.hacked" in text_of(page, "main")
        assert page.execute_script("return window.hacked") is None


def test_injected_html_would_not_run_either(visit: Any, browser: webdriver.Chrome) -> None:
    page = visit("/runs")
    page.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:,x onerror=window.hacked=1>');"
        "const s = document.createElement('script'); s.textContent = 'window.hacked=1'; document.body.append(s);"
    )
    heard: list[str] = []

    def both_were_refused() -> bool:
        heard.extend(complaints(browser))
        return len(heard) == 2

    until(both_were_refused)
    assert all("Content Security Policy" in each for each in heard)
    assert page.execute_script("return window.hacked") is None


def test_the_saved_file_looks_the_same_without_a_server(visit: Any, shown: Path) -> None:
    report = run_view.write(shown / "runs" / "done")
    page = visit("/runs")
    page.get(report.as_uri())
    assert page.execute_script("return getComputedStyle(document.querySelector('.cards')).display") == "grid"
    assert page.find_elements(By.CSS_SELECTOR, "svg.only .line")
    assert page.execute_script(CONTRAST) == []
    size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    check_width(page)
