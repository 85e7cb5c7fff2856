"""`cpsgd dashboard`: plan, watch runs, read budgets and audits, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from cpsgd.cli import output
from cpsgd.cli.frame import WHOLE


def run(
    folder: Annotated[
        Path, Parameter(name="FOLDER", help="Where runs, ledgers and the JSON of audits are, up to two folders down.")
    ] = Path("."),
    /,
    *,
    port: Annotated[
        int,
        WHOLE,
        Parameter(validator=validators.Number(gte=0, lte=65_535), help="Port to listen on; 0 for a free one."),
    ] = 0,
) -> None:
    """Plan, watch runs, and read budgets and audits in the browser.

    Listens on 127.0.0.1 only, shows and changes nothing, and needs the token in the address that it prints.
    """
    from cpsgd.dashboard.serving import serve

    console = output.console()

    def tell(address: str) -> None:
        console.print(f"Dashboard: {address}", markup=False, soft_wrap=True)
        console.print("Stop with Ctrl-C.", markup=False)

    serve(folder, port, tell)
