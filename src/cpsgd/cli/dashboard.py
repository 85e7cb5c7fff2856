"""`cpsgd dashboard`: plan, watch runs and two servers, read budgets and audits, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from cpsgd.cli import options, output
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import CpsgdError


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
    pair: Annotated[
        Path | None, options.file_option("A task of two servers, task.json: both are asked how far they are.")
    ] = None,
    ca: Annotated[
        Path | None,
        options.file_option("Certificates that these servers' must be signed by; the system's if not given."),
    ] = None,
    insecure: Annotated[bool, Parameter(help="Ask these servers also by plain http at other machines.")] = False,
) -> None:
    """Plan, watch runs and two servers, and read budgets and audits in the browser.

    Listens on 127.0.0.1 only, shows and changes nothing, and needs the token in the address that it prints. Nothing
    outside of this machine is asked, but for the servers of a task that --pair names.
    """
    from cpsgd.dashboard.serving import serve

    watched = None
    if pair is not None:
        try:
            from cpsgd.dashboard.pair_page import PairWatch
        except ImportError as error:
            raise CpsgdError(f"To watch two servers needs {error.name}: pip install 'cpsgd[pair]'.") from None
        from cpsgd.engines.pair.task import PairTask

        watched = PairWatch(PairTask.read(pair), ca, insecure)
    console = output.console()

    def tell(address: str) -> None:
        console.print(f"Dashboard: {address}", markup=False, soft_wrap=True)
        console.print("Stop with Ctrl-C.", markup=False)

    serve(folder, port, tell, watched)
