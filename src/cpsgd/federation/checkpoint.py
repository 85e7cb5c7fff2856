"""A server's file with the last model and the reports of all rounds, so that a run goes on where it was stopped.

The order of writes decides which rounds a stopped server may run again:

* A round is *begun* under the name of a run, before anybody is asked for anything (and after its charge to the ledger).
* It is *revealing* from before the first request that helps to reveal its sum.
* It is *over* when its model, or that it was withheld, is in the file.

A round that was begun and not revealing has told the server nothing: it is run again, and its charge pays for it. One
that was revealing may have told the server its sum: it counts as run, with its charge, and its result is lost. Either
way no round is charged twice, and no more rounds are run than were planned.

**The file** is a NumPy archive after a line with its digest (`cpsgd._durable.seal`). Files of 0.2.0 are the archive
alone. Their members have checksums, but a damaged directory can hide a member. So all bytes must belong to members.
"""

from __future__ import annotations

import io
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from cpsgd._durable import is_sealed, seal, unseal, write_file
from cpsgd.errors import CheckpointError, DamagedFileError
from cpsgd.federation.sessions import Node, RoundReport
from cpsgd.secagg import Stage

_FORMAT = "cpsgd course 1"
_KIND = "course"
_OPTIMIZER = "optimizer "
# The types of what is plain.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "fingerprint": str,
    "clip": (float, int),
    "begun": int,
    "charged_to": str,
    "revealing": bool,
    "course": str,
    "asked": list,
}
_MAPS = ("dropped", "stages", "faults", "metrics", "measures", "upload_bytes", "accused", "relay_bytes")


@dataclass
class Standing(Generic[Node]):
    """The progress of a run.

    Attributes:
        fingerprint: Of the plan's protocol, in hexadecimal.
        model: The model after the last round that is over.
        optimizer: State of the server's optimizer, by name.
        clip: The norm that the next round's updates are clipped to, where it adapts; otherwise 0.
        reports: Reports of the rounds that are over, in order.
        begun: The round that was begun and is not over, or 0.
        charged_to: The name of the run under which it was begun.
        revealing: Whether its sum may have been revealed.
        course: The name of the run that began with the first round.
        asked: Nodes that it was begun with: if its sum may have been revealed, they have taken part.
    """

    fingerprint: str
    model: NDArray[np.float32]
    optimizer: dict[str, NDArray[Any]] = field(default_factory=dict)
    clip: float = 0.0
    reports: list[RoundReport[Node]] = field(default_factory=list)
    begun: int = 0
    charged_to: str = ""
    revealing: bool = False
    course: str = ""
    asked: list[Node] = field(default_factory=list)


def save(path: Path, progress: Standing[Any]) -> None:
    """Replaces the file; the old content is there until all of the new one is on the disk."""
    about = {"format": _FORMAT, **vars(progress), "reports": [_plain(report) for report in progress.reports]}
    del about["model"], about["optimizer"]
    arrays = {f"{_OPTIMIZER}{name}": array for name, array in progress.optimizer.items()}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, about=text, model=progress.model, **arrays)
    write_file(path, seal(_KIND, buffer.getvalue()))


def load(path: Path, fingerprint: str, dim: int) -> Standing[Any] | None:
    """Reads what `save` wrote last for a run with this protocol; returns None if there is no file.

    Raises:
        CheckpointError: The file is of another plan or model, or is damaged.
    """
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        arrays = _arrays(unseal(_KIND, data) if is_sealed(data) else data)
        found = _standing(arrays)
    except (
        *(ValueError, KeyError, TypeError, OSError, AttributeError, EOFError, RuntimeError, OverflowError, MemoryError),
        *(BadZipFile, struct.error, DamagedFileError),
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read as a run's checkpoint ({type(error).__name__}). Restore it from a copy, or name "
            "another file to begin anew."
        ) from None
    if found.fingerprint != fingerprint or found.model.shape != (dim,):
        raise CheckpointError(
            f"{path} is of a run with another plan. Go on with that plan, or name another file to begin anew."
        )
    return found


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an archive by name; checks that each is whole and that none is missing."""
    found, place = {}, 0
    with ZipFile(io.BytesIO(data)) as archive:
        for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
            if member.compress_type != ZIP_STORED or member.header_offset != place:
                raise ValueError("directory")
            lengths = struct.unpack_from("<HH", data, place + 26)  # of the name and of further fields
            place += 30 + sum(lengths) + member.compress_size
            # Reads all bytes, and so checks their checksum.
            content = io.BytesIO(archive.read(member))
            found[member.filename.removesuffix(".npy")] = np.lib.format.read_array(content, allow_pickle=False)
        if place != archive.start_dir:
            raise ValueError("directory")
    return found


def _standing(arrays: dict[str, NDArray[Any]]) -> Standing[Any]:
    """Returns the progress that `save` turned into these arrays; raises ValueError, KeyError or TypeError if none."""
    about = json.loads(arrays.pop("about").tobytes())
    model = arrays.pop("model")
    if about.pop("format") != _FORMAT or model.dtype != np.float32:
        raise ValueError("format")
    reports = [_report(fields) for fields in about.pop("reports")]
    if any(not name.startswith(_OPTIMIZER) for name in arrays):
        raise ValueError("name")
    optimizer = {name.removeprefix(_OPTIMIZER): array for name, array in arrays.items()}
    if any(not isinstance(value, _TYPES[name]) for name, value in about.items()):
        raise TypeError
    return Standing(model=model, optimizer=optimizer, reports=reports, **about)


def _plain(report: RoundReport[Any]) -> dict[str, Any]:
    return {**vars(report), **{name: list(getattr(report, name).items()) for name in _MAPS}}


def _report(fields: dict[str, Any]) -> RoundReport[Any]:
    # Earlier releases handed nothing on.
    fields = {"relay_bytes": [], "proved": [], **fields}
    maps = {name: dict(fields[name]) for name in _MAPS}
    maps["stages"] = {node: Stage(stage) for node, stage in maps["stages"].items()}
    return RoundReport(**{**fields, **maps})
