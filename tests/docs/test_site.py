"""The site builds strictly, loads nothing from elsewhere, and has every public name and command."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs._site.examples import fenced
from docs._site.pages import PACKAGES, public_names, uri_of

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without the network; a warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", _refused)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        assert config.strict
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    logging.getLogger("mkdocs").handlers.clear()
    return folder


def _refused(*arguments: object) -> None:
    raise AssertionError("The build asked for the network.")


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


@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver") and importlib.util.find_spec("selenium")),
    reason="needs Chromium with its driver, and selenium",
)
def test_search_works_from_the_disk(site: Path) -> None:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get((site / "index.html").as_uri())
        browser.execute_script("document.querySelector('[for=__search]').click()")
        field = browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
        WebDriverWait(browser, 20).until(lambda _: field.is_displayed())
        field.send_keys("modulus")
        wait = WebDriverWait(browser, 20)
        assert wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item"))
    finally:
        browser.quit()


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


@pytest.mark.parametrize("package", ["cpsgd", "cpsgd.statistics"])
def test_the_names_people_begin_with_have_examples(package: str) -> None:
    module = importlib.import_module(package)
    results = {"Planned", "TableReport", "Statistic", "TableQuestion"}  # what the others return
    for name in set(public_names(package)) - results:
        found = getattr(module, name)
        if inspect.isclass(found) and issubclass(found, Warning):
            continue
        members = vars(found).values() if inspect.isclass(found) else ()
        texts = [inspect.getdoc(each) or "" for each in (found, *members) if each is found or callable(each)]
        assert any(">>>" in text for text in texts), f"{package}.{name}"


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
