"""`cpsgd round identity`: the keys by which clients of secure aggregation know each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cpsgd.cli import options, output
from cpsgd.cli.commands import ROUND
from cpsgd.cli.frame import command, new_app

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

app = new_app("identity", example=ROUND["identity"].example)

KeyFile = Annotated[Path, Parameter(name="KEYFILE", help="The private key's file, as ssh-keygen makes it.")]
Name = Annotated[
    str | None,
    Parameter(
        help="What people call the identity; if not given, as it was created, or the file's name without suffix."
    ),
]


@command(app, "cpsgd round identity create silo-1.key --name silo-1")
def create(keyfile: KeyFile, /, *, name: Name = None, json: options.Json = False) -> None:
    """Make an identity and print its public key, the line for the roster.

    The file is one that ssh-keygen -t ed25519 could have made, without a passphrase; only its owner may read it. The
    line also goes to a file beside it, .pub at the end of its name. A file that exists is never overwritten.
    """
    from cpsgd.secagg import create_identity
    from cpsgd.secagg.identity_files import check_name

    # Before there is a file.
    called = check_name(keyfile.stem if name is None else name)
    _show(create_identity(keyfile, called), keyfile, called, json)


@command(app, "cpsgd round identity show silo-1.key")
def show(keyfile: KeyFile, /, *, name: Name = None, json: options.Json = False) -> None:
    """Print the public key of an identity, the line for the roster, with the name that it was given."""
    from cpsgd.secagg import read_identity
    from cpsgd.secagg.identity_files import name_of

    identity = read_identity(keyfile)
    _show(identity, keyfile, name_of(keyfile, identity) if name is None else name, json)


def _show(identity: Ed25519PrivateKey, keyfile: Path, name: str, json: bool) -> None:
    from cpsgd.secagg import public_line

    line = public_line(identity, name)
    if json:
        output.show_json({"file": keyfile, "public_key": line})
    else:
        # As it is, to be appended to a roster: no colours, no wrapping.
        print(line)
