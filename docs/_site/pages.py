"""Pages of the site that are not written in docs/: README.md as its front, commands, names, notebooks.

A hook of mkdocs. Links that leave docs/ are led to a page made here or to a copy of the file in the site, so that the
same Markdown can be read on the site and in the repository.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs._site.indices import typeset

ROOT = Path(__file__).parents[2]

PROJECT = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "SECURITY.md": "project/security.md",
    "examples/flower-digits/README.md": "project/flower-digits.md",
    "examples/phones/README.md": "project/phones.md",
    "examples/nvflare-digits/README.md": "project/nvflare-digits.md",
    "reproduction/README.md": "project/reproduction.md",
}
"""Pages outside of docs/, and where they are on the site."""

PACKAGES = {
    "cpsgd": "plan Plan Protocol Aggregator guarantee Guarantee Run make_private PrivateMean RoundSimulator Adjacency "
    "ExpectedError ErrorBound",
    "cpsgd.planner": "plan plan_examples plan_passes Plan PassesPlan Requirements FrontierPoint Considered",
    "cpsgd.privacy": "guarantee Guarantee guarantee_over_rounds solve NoiseBudget Adjacency Participation "
    "optimal_composition analytic_epsilon analytic_sigma gdp_epsilon gdp_delta gdp_mu classical_epsilon "
    "classical_sigma certified_epsilon gaussian_certificate GaussianCertificate renyi_certificate RenyiCertificate "
    "outsiders_epsilon CITATIONS",
    "cpsgd.mechanisms": "Coins SampledCoins LazyCoins RoundedGaussian DiscreteGaussian Skellam Binomial Gaussian "
    "Mechanism ExpectedError ErrorBound",
    "cpsgd.statistics": "mean sum count histogram quantiles report kmeans pca Statistic TableReport CutOff Mean Sum "
    "Count Histogram Quantiles Components Clusters Planned prepare TableQuestion Job Partial ClippingWarning "
    "NoiseWarning",
    "cpsgd.learning": "Trainer CohortOptions ClientOptions ServerOptions AccountOptions RunOptions FolderOptions "
    "RoundMetrics NoPrivacy baselines mlp without_batch_norm loss_for squared_error tensorboard",
    "cpsgd.learning.datasets": "from_frame from_arrays from_torch load load_digits infinite_digits load_mnist "
    "infinite_mnist load_fashion_mnist load_changelogs Dataset Batch ArrayDataset ExampleDataset ImageDataset "
    "InfiniteDataset by_client iid dirichlet Partition fingerprint NAMES",
    "cpsgd.engines.flower": "CpsgdStrategy cpsgd_mod silo_sum accepted_round Limits RoundReport ask_question "
    "answer_question",
    "cpsgd.engines.nvflare": "CpsgdRecipe silo_sum accepted_round Limits CpsgdController CpsgdExecutor "
    "question_controller answer_question read_answers zero_model",
    "cpsgd.engines.pair": "Sender Collector create_task PairTask Secrets",
    "cpsgd.engines.ddp": "ExampleGradients WorkerGradients PrivateOptimizer",
    "cpsgd.engines.spark": "ask to_frame sums",
    "cpsgd.engines.beam": "UserSums SumUsers write_sums read_sums",
    "cpsgd.ledger": "Ledger Budget RoundEvent Entry Total Verification Head check_report Report Witness Line Unit",
    "cpsgd.audit": "audit AuditReport Claim epsilon_lower_bound survey Survey Case all_cases Coverage Check Encode "
    "Start ServerHalf",
    "cpsgd.secagg": "SecureParameters SecureClient SecureServer SecureSum Stage Invitation risk Risk create_identity "
    "public_line read_identity read_roster offenders",
    "cpsgd.federation": "Limits ClientSession Terms begin_round RoundSession RoundReport Course carry Transport "
    "AdaptiveClip",
    "cpsgd.paper.theorem": "binomial_mechanism_epsilon binomial_mechanism_trials theorem_epsilon rounded_epsilon "
    "quantization_sensitivities Sensitivities Constants",
    "cpsgd.paper.bounds": "gaussian_error rounding_error rotated_error coordinate_range",
    "cpsgd.errors": "",
}
"""Modules whose names are public, each a page of the reference, with the names in the order in which users need them.
An empty text takes the order of the module."""

LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
DIRECTIVE = re.compile(r"^[ ]*<!-- (?:not run|before|file|thorough|noisy|output)\b.*?-->\n+", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and files that are not in docs/."""
    for source, uri in PROJECT.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package}.md", content=names_page(package)))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for uri, content in notebook_files(notebook):
            files.append(File.generated(config, uri, content=content))
    wanted = {target for file in files.documentation_pages() for target in outside(file)}
    for target in sorted(wanted):
        files.append(File.generated(config, f"files/{target}", content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where their targets are on the site, and leaves out what is said to the tests."""
    folder = posixpath.dirname(source_of(page.file.src_uri))

    def led(match: re.Match[str]) -> str:
        uri = uri_of(folder, match[1])
        if uri is None:
            return match[0]
        return f"]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{match[2] or ''})"

    shown = typeset(markdown) if page.file.src_uri.startswith("proofs/") else markdown
    return LINK.sub(led, DIRECTIVE.sub("", shown))


def source_of(uri: str) -> str:
    """Where a page of the site is in the repository."""
    return next((source for source, made in PROJECT.items() if made == uri), f"docs/{uri}")


def uri_of(folder: str, link: str) -> str | None:
    """The place on the site of what a page in this folder of the repository links to; None for other sites."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(folder, link))
    if target in PROJECT:
        return PROJECT[target]
    if target.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
    return f"files/{target}"


def outside(file: File) -> Iterator[str]:
    """Files of the repository that a page links to and that no page of the site is made of."""
    folder = posixpath.dirname(source_of(file.src_uri))
    for link, _ in LINK.findall(file.content_string):
        uri = uri_of(folder, link) or ""
        if uri.startswith("files/") and (ROOT / uri.removeprefix("files/")).is_file():
            yield uri.removeprefix("files/")


def commands() -> str:
    """The commands with all their options, as the command line itself knows them."""
    from cpsgd.cli.app import command_line

    text = command_line(full=True).generate_docs(output_format="markdown", heading_level=1, usage_name="cpsgd")
    contents = re.compile(r"^## Table of Contents\n.*?(?=^\*\*Commands)", re.MULTILINE | re.DOTALL)
    text = contents.sub("", text).replace("# cpsgd\n", "# Commands\n", 1)
    # Where mkdocs runs as a module, the name of its program would stand in every usage.
    text = re.sub(r"^(cpsgd\b[ \w-]*?) -m mkdocs\b", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"^```console\n", "```text\n", text, flags=re.MULTILINE)


def public_names(module: str) -> list[str]:
    """What a module defines or passes on, in the order in which it does."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.asname == alias.name]
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            found.append(node.name)
    return found


def names_page(module: str) -> str:
    """The page of a module: every public name with its docstring."""
    members = "".join(f"        - {name}\n" for name in PACKAGES[module].split() or public_names(module))
    return f"# `{module}`\n\n::: {module}\n    options:\n      members:\n{members}"


def notebook_files(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page, and its pictures."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/svg+xml" in data:
                name = f"{path.stem}-{number}.svg"
                yield f"notebooks/{name}", "".join(data["image/svg+xml"])
                parts.append(f"![Output of the cell above]({name})")
            elif "image/png" in data:
                name = f"{path.stem}-{number}.png"
                yield f"notebooks/{name}", base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    heading, _, rest = "\n\n".join(parts).partition("\n")
    download = f'<a class="md-button" href="{path.name}" download>Download this notebook</a>'
    yield f"notebooks/{path.stem}.md", f"{heading}\n\n{download}\n{rest}\n"
