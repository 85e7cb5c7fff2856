"""The site builds strictly, loads nothing from elsewhere, and has every public name and command."""

from __future__ import annotations

import doctest
import html
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from cpsgd.cli.app import app
from docs._site import book
from docs._site.examples import fenced
from docs._site.pages import PACKAGES, public_names, uri_of
from docs._site.plans import CLIENTS, DIMS, EPSILONS, read
from docs._site.plans import OUT as PLANS
from docs._site.plans import points as plan_points

ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Loaded(HTMLParser):
    """What a page loads, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADS.get(tag, ""))
        if address and not (tag == "link" and given.get("rel") in {"canonical", "next", "prev"}):
            self.loads.append(address)


@pytest.fixture(scope="session")
def site(once: Callable[..., Path]) -> Path:
    return once(build) / "site"


def build(folder: Path) -> None:
    """Builds the site as `make docs` does, by a process that has no network; a warning is an error."""
    guard = folder / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(
        "import socket\n"
        "def refused(*arguments):\n"
        "    raise AssertionError('The build asked for the network.')\n"
        "socket.socket.connect = refused\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(guard), str(ROOT)]), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        reader = Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        for address in reader.loads:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
            if not address.startswith(("data:", "#")) and page.name != "404.html":
                assert (page.parent / address.partition("?")[0].partition("#")[0]).exists(), f"{page}: {address}"
        text = page.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text  # the theme would fetch a script for it
        assert "<!-- not run" not in text
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_finds_pages_commands_and_names(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {entry["location"] for entry in entries}
    for place in (
        "index.html",
        "tutorials/first-mean.html",
        "explanation/which-library.html",
        "notebooks/one-bit.html",
        "reference/commands.html#cpsgd-budget-verify",
        "reference/cpsgd.html#cpsgd.Protocol.encode",
    ):
        assert place in places, place
    assert "mkdocs" not in (site / "reference" / "commands.html").read_text(encoding="utf-8").partition("<article")[2]
    # For pages that are opened from the disk.
    assert (site / "search" / "search_index.js").exists()
    assert (site / "assets" / "iframe-worker.js").exists()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    for package in PACKAGES:
        text = (site / "reference" / f"{package}.html").read_text(encoding="utf-8")
        for name in public_names(package):
            assert f'id="{package}.{name}"' in text, f"{package}.{name}"


def test_both_palettes_and_system_fonts(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'data-md-color-scheme="default"' in text
    assert 'data-md-color-scheme="slate"' in text
    assert "fonts.googleapis" not in text


BROWSER = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver") and importlib.util.find_spec("selenium")),
    reason="needs Chromium with its driver, and selenium",
)
LOOK = """
const images = [...document.images];
return {
  width: document.documentElement.scrollWidth,
  broken: images.filter(image => image.complete && !image.naturalWidth).map(image => image.src),
  wide: images.filter(image => image.getBoundingClientRect().width > innerWidth).map(image => image.src),
  fetched: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("file:")),
  wrong: document.querySelectorAll(".katex-error").length,
  white: images.filter(image => image.closest(".md-content") && !/dashboard|screenshot/.test(image.src)
    && document.body.getAttribute("data-md-color-scheme") === "slate"
    && getComputedStyle(image).filter === "none").map(image => image.src),
};
"""


@contextmanager
def opened(width: int, scheme: str) -> Iterator[Any]:
    """A browser with a window of this width, for people who prefer the light or the dark scheme."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        yield browser
    finally:
        browser.quit()


@BROWSER
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_fit_the_screen_and_show_everything(site: Path, width: int, scheme: str) -> None:
    with opened(width, scheme) as browser:
        for page in sorted(site.rglob("*.html")):
            browser.get(page.as_uri())
            seen = browser.execute_script(LOOK)
            assert seen.pop("width") <= width, page  # less by the scroll bar
            assert seen == {"broken": [], "wide": [], "fetched": [], "wrong": 0, "white": []}, page
        browser.get((site / "index.html").as_uri())
        chosen = browser.execute_script("return document.body.getAttribute('data-md-color-scheme')")
        assert chosen == {"dark": "slate", "light": "default"}[scheme]


@BROWSER
@pytest.mark.slow
def test_formulas_are_typeset(site: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    with opened(390, "light") as browser:
        browser.get((site / "proofs" / "gaussian-certificate.html").as_uri())
        count = "return document.querySelectorAll('.arithmatex .katex').length"
        formulas = browser.execute_script("return document.querySelectorAll('.arithmatex').length")
        assert formulas > 8
        WebDriverWait(browser, 20).until(lambda _: browser.execute_script(count) >= formulas)


@BROWSER
def test_search_works_from_the_disk(site: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    with opened(1280, "light") as browser:
        browser.get((site / "index.html").as_uri())
        browser.execute_script("document.querySelector('[for=__search]').click()")
        field = browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
        WebDriverWait(browser, 20).until(lambda _: field.is_displayed())
        field.send_keys("modulus")
        wait = WebDriverWait(browser, 20)
        assert wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item"))


@BROWSER
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_planner_shows_its_table_of_plans(site: Path, width: int, scheme: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.select import Select

    with opened(width, scheme) as browser:
        browser.get((site / "how-to" / "planner.html").as_uri())
        for name, chosen in (("clients", "10,000"), ("dim", "1,000"), ("epsilon", "0.5")):
            Select(browser.find_element(By.ID, f"planner-{name}")).select_by_visible_text(chosen)
        for secure in (False, True):
            kept = points_of(read(), secure=secure, clients=10_000, dim=1_000, epsilon=0.5)
            best = next((point for point in kept if point[3] <= 1.1), None) or min(kept, key=lambda point: point[3])
            shown = browser.find_elements(By.CSS_SELECTOR, "#planner-table tbody tr")
            assert len(shown) == len(kept)
            (marked,) = browser.find_elements(By.CSS_SELECTOR, "#planner-table .best")
            assert marked.text.split()[0] == f"{best[0]:g}"
            assert marked.text.split()[-1] == best[4]
            command = browser.find_element(By.ID, "planner-command").text
            assert command == (
                "cpsgd plan --clients 10000 --dim 1000 --epsilon 0.5 --delta 0.000001 "
                f"--bits {best[0]:g}{' --secure' if secure else ''}"
            )
            app.parse_args(command.split()[1:], exit_on_error=False, print_error=False)
            assert f"{best[0]:g} bit" in browser.find_element(By.ID, "planner-said").text
            circles = browser.find_elements(By.CSS_SELECTOR, "#planner-chart circle")
            assert len(circles) == len([point for point in kept if point[3] <= 100])
            browser.execute_script("document.getElementById('planner-secure').click()")
        assert browser.execute_script(LOOK)["fetched"] == []


def points_of(table: dict[str, Any], *, secure: bool, clients: int, dim: int, epsilon: float) -> list[list[Any]]:
    """Returns a plan's points in the planner's table."""
    grid = itertools.product((False, True), table["clients"], table["dims"], table["epsilons"])
    return dict(zip(grid, table["plans"], strict=True))[secure, clients, dim, epsilon]


def test_the_planners_table_is_small_and_right() -> None:
    table = read()
    assert PLANS.stat().st_size < 300_000
    assert (tuple(table["clients"]), tuple(table["dims"]), tuple(table["epsilons"])) == (CLIENTS, DIMS, EPSILONS)
    case = {"clients": 100, "dim": 1_000_000, "epsilon": 4.0}
    for secure in (False, True):
        kept, found = points_of(table, secure=secure, **case), plan_points(**case, secure=secure)
        # A planner that became better makes the table cautious, not wrong.
        errors = {point[0]: point[2] for point in kept}
        assert errors.keys() == {point[0] for point in found}
        for bits, _, error, *_ in found:
            assert 0.999 * error <= errors[bits] <= 1.1 * error
    for points in table["plans"]:
        assert all(error > 0.0 and ratio > 0.99 for _, _, error, ratio, _ in points)


def test_the_picture_book_is_drawn_by_its_script(tmp_path: Path) -> None:
    book.draw(tmp_path)
    for name in book.PICTURES:
        assert (tmp_path / f"{name}.svg").read_bytes() == (book.FOLDER / f"{name}.svg").read_bytes(), name


@pytest.mark.slow
def test_usage_lines_are_commands(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "commands.html").read_text(encoding="utf-8")))
    usages = re.findall(r"^(cpsgd .*(?:COMMAND|OPTIONS).*)$", text, re.MULTILINE)
    paths = {tuple(itertools.takewhile(re.compile(r"[a-z][a-z-]*$").match, usage.split()[1:])) for usage in usages}
    assert {("train",), ("table", "sum"), ("round", "identity", "create"), ("budget", "check-report")} <= paths
    assert not [usage for usage in usages if " -m " in usage or "mkdocs" in usage]


@pytest.mark.slow
def test_links_lead_somewhere(site: Path) -> None:
    """Every link within the site, with its anchor."""
    anchors: dict[Path, set[str]] = {}
    for page in sorted(site.rglob("*.html")):
        anchors[page.resolve()] = set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        for address in re.findall(r'<a [^>]*\bhref="([^"]+)"', page.read_text(encoding="utf-8")):
            place, _, anchor = html.unescape(address).partition("#")
            if re.match(r"[a-z]+:", place):
                continue
            target = (page.parent / unquote(place)).resolve() if place else page.resolve()
            assert target.exists(), f"{page}: {address}"
            if anchor and target.suffix == ".html" and not anchor.startswith("__"):
                assert unquote(anchor) in anchors[target], f"{page}: {address}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    module = importlib.import_module(package)
    for name in public_names(package):
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert inspect.getdoc(found), f"{package}.{name}"


def test_what_import_cpsgd_offers_is_public() -> None:
    import cpsgd

    offered = {name for name in dir(cpsgd) if not name.startswith("_") and not inspect.ismodule(getattr(cpsgd, name))}
    assert offered == set(public_names("cpsgd")) == set(cpsgd.__all__) == set(cpsgd._HOMES)


SHOWN_ELSEWHERE = {
    # Names that others return, whose examples show them.
    *("Planned", "TableReport", "Statistic", "TableQuestion", "Considered", "FrontierPoint", "NoiseBudget"),
    *("GaussianCertificate", "RenyiCertificate", "RoundMetrics", "ArrayDataset", "ExampleDataset", "ImageDataset"),
    *("InfiniteDataset", "Partition", "Entry", "Total", "Verification", "Head", "Report", "Line", "AuditReport"),
    *("Claim", "Survey", "Coverage", "Check", "SecureSum", "Invitation", "Risk", "RoundReport", "RoundSession"),
    *("Secrets", "PairTask", "Sensitivities", "Constants", "PassesPlan"),
    # Names that one example shows together: SecureClient, begin_round, Ledger, audit.
    *("SecureServer", "Stage", "ClientSession", "Terms", "Witness", "ServerHalf"),
    # Names that need files, servers or other processes: the tutorials' files and the engines' tests run them.
    *("load_mnist", "infinite_mnist", "load_fashion_mnist", "load_changelogs", "tensorboard"),
    *("Sender", "Collector", "Course", "carry", "Transport", "silo_sum", "accepted_round", "ask_question"),
    *("answer_question", "read_answers", "CpsgdExecutor", "CpsgdController"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_examples_that_print_an_answer(package: str) -> None:
    module = importlib.import_module(package)
    for name in set(public_names(package)) - SHOWN_ELSEWHERE:
        found = getattr(module, name)
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        if is_error or not (inspect.isclass(found) or inspect.isfunction(found)):
            continue
        members = vars(found).values() if inspect.isclass(found) else ()
        texts = [inspect.getdoc(each) or "" for each in (found, *members) if each is found or callable(each)]
        printed = [example.want for text in texts for example in doctest.DocTestParser().get_examples(text)]
        assert set(re.sub(r"[(),]|True|False", " ", " ".join(printed)).split()), f"{package}.{name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name_once(package: str) -> None:
    listed = PACKAGES[package].split() or public_names(package)
    assert sorted(listed) == sorted(public_names(package))


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"([\w./-]+\.md)$", text, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed


def test_the_changelog_keeps_its_form() -> None:
    """What is unreleased, then releases, this version first, each with the usual sections once."""
    import cpsgd

    releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    numbered = releases[1:] if releases[0].startswith("[Unreleased]\n") else releases
    names = [re.match(r"\[(\d+\.\d+\.\d+)\] - (?:unreleased|\d{4}-\d\d-\d\d)\n", each) for each in numbered]
    assert all(names)
    assert names[0] is not None
    assert names[0][1] == cpsgd.__version__
    for each in releases:
        sections = re.findall(r"^### (.*)$", each, re.MULTILINE)
        assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        assert len(sections) == len(set(sections))


def test_links_are_led_to_their_pages() -> None:
    assert uri_of("docs", "planning.md") == "planning.md"
    assert uri_of("docs/tutorials", "../../SECURITY.md") == "project/security.md"
    assert uri_of("docs/tutorials", "../notebooks/table.ipynb") == "notebooks/table.md"
    assert uri_of("docs", "../tests/data/wire-format.json") == "files/tests/data/wire-format.json"
    assert uri_of("docs", "https://flower.ai") is None


def test_indented_examples_are_fenced_where_they_are() -> None:
    assert fenced("Example:\n    >>> 1 + 1\n    2\n") == "Example:\n    ```pycon\n    >>> 1 + 1\n    2\n    ```"
