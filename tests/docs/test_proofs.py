"""Every ε that the program can print leads to a page with its proof."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

from cpsgd.ledger.charging import BASIC
from cpsgd.privacy.filters import GAUSSIAN_CITATION, RENYI_CITATION
from cpsgd.privacy.outsiders import CITATION as OUTSIDERS_CITATION
from cpsgd.privacy.proofs import all_proofs
from cpsgd.privacy.proofs.argument import COMPOSED
from docs._site.indices import typeset

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "accounting.md"
PAGES = sorted((ROOT / "docs" / "proofs").glob("*.md"))
ROW = re.compile(r"^\| `?([^|`]+?)`? \|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\(([\w/-]+\.md)(?:#([^)]+))?\)")
PLACE = re.compile(r"docs/proofs/[\w-]+\.md")


def listed() -> dict[str, list[tuple[str, str]]]:
    """Returns the pages and anchors that the index gives for each printed method."""
    return {name: LINK.findall(rest) for name, rest in ROW.findall(INDEX.read_text(encoding="utf-8"))}


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as the site makes them."""
    slug = slugify(case="lower")
    lines = page.read_text(encoding="utf-8").split("\n")
    return {slug(line.lstrip("# "), "-") for line in lines if re.match(r"#{1,3} ", line)}


METHODS = {proof.name: proof.citation for proof in all_proofs()} | COMPOSED
METHODS |= {
    "outsiders": OUTSIDERS_CITATION,
    BASIC: "",
    "gaussian composition": "",
    "gaussian-filter": GAUSSIAN_CITATION,
    "renyi-filter": RENYI_CITATION,
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_a_page_and_an_anchor(method: str) -> None:
    places = listed()[method]
    assert places, method
    for page, anchor in places:
        assert (INDEX.parent / page).is_file(), page
        assert not anchor or anchor in headings(INDEX.parent / page), (page, anchor)
    for named in PLACE.findall(METHODS[method]):
        assert named.removeprefix("docs/") in {page for page, _ in places}, named


@pytest.mark.parametrize(
    "proof", [proof for proof in all_proofs() if not proof.comparison], ids=lambda proof: proof.name
)
def test_a_citation_names_a_paper_or_a_page(proof: object) -> None:
    citation = str(getattr(proof, "citation"))  # noqa: B009
    assert PLACE.search(citation) or re.search(r"Theorem", citation)


def test_the_code_names_no_page_that_is_missing() -> None:
    for path in (
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "reproduction").rglob("*.py"),
    ):
        for named in PLACE.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / named).is_file(), f"{path}: {named}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_its_purpose_statement_and_users(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    opening = text.partition("\n## ")[0]
    places = [opening.find(f"**{word}**") for word in ("What it is for.", "Statement.", "Who relies on it.")]
    assert -1 < places[0] < places[1] < places[2], page.name
    assert f"proofs/{page.name}" in INDEX.read_text(encoding="utf-8"), page.name


def formulas(page: Path) -> list[str]:
    """Returns what a page has between dollars."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    return found + re.findall(r"\$([^$\n]+(?:\n[^$\n]+)?)\$", re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL))


def mistakes(found: dict[str, list[str]]) -> str:
    """Returns what KaTeX itself, which reads every formula of these pages, complains about."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    script = (
        "const katex = require(process.argv[1]), options = {displayMode: true, strict: 'ignore'};"
        "for (const [page, formulas] of Object.entries(JSON.parse(require('fs').readFileSync(0, 'utf8'))))"
        "  for (const formula of formulas)"
        "    try { katex.renderToString(formula, options); } catch (error) { console.log(`${page}: ${error}`); }"
    )
    katex = str(ROOT / "docs/assets/katex/katex.min.js")
    done = subprocess.run(
        [node, "-e", script, katex], input=json.dumps(found), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_formulas_have_no_mistakes() -> None:
    """One process for all pages: each takes a tenth of a second to begin."""
    found = {page.stem: formulas(page) for page in PAGES}
    assert sum(map(len, found.values())) > 300
    assert mistakes(found) == ""
    assert "wrong: ParseError" in mistakes({"right": ["x^2"], "wrong": ["x^{2"]})


def test_indices_are_typeset_and_code_is_not() -> None:
    assert typeset("G_{√Σμ_j²}, R_t^p, Σ tail_mass, 2^−F") == (
        "G<sub>√Σμ<sub>j</sub>²</sub>, R<sub>t</sub><sup>p</sup>, Σ tail_mass, 2<sup>−F</sup>"
    )
    assert typeset("`x_1` $y_1$ [z](a_b.md)") == "`x_1` $y_1$ [z](a_b.md)"
