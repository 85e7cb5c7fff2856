"""What a client holds: no seed is used twice in a round, whatever the server asks for, and whatever is killed when."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd._durable import unseal
from cpsgd.correlated.batons import Place, seal
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import BatonError, CpsgdError, MessageError, RoundError, RoundRefusedError
from cpsgd.federation.client_files import Memory

PLACE = Place("77", bytes(16), bands=4, round=1)


def at(round: int, lineage: int = 0) -> Place:
    return replace(PLACE, round=round, lineage=lineage)


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here, and waiting for a disk takes most of the time."""
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def silo(tmp_path: Path) -> SeedFile:
    return Memory(tmp_path / "memory").seeds


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(unseal("seeds", path.read_bytes()))["lineages"]
    return found


def test_a_file_of_release_0_2_0_is_read_and_then_sealed(tmp_path: Path, silo: SeedFile) -> None:
    own = silo.draw(at(1))[0]
    path = tmp_path / "memory.lineages"
    path.write_bytes(unseal("seeds", path.read_bytes()))
    assert silo.draw(at(2))[1] == own
    assert len(content(path)) == 1
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(RoundRefusedError, match="file of its lineages"):
        silo.draw(at(3))


def another(tmp_path: Path, name: str) -> SeedFile:
    return Memory(tmp_path / name).seeds


def test_a_file_of_more_than_four_mebibytes_is_not_read(tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(1))
    path = tmp_path / "memory.lineages"
    plain = unseal("seeds", path.read_bytes())
    path.write_bytes(plain.rjust(1 << 22))
    assert silo.earlier(at(2))[0] is not None
    path.write_bytes(plain.rjust((1 << 22) + 1))
    with pytest.raises(RoundRefusedError, match="file of its lineages"):
        silo.earlier(at(2))


@pytest.mark.parametrize("seed", ["00" * 15, "00" * 17, "", "x"])
def test_a_file_with_a_seed_that_is_none_is_refused(seed: str, tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(1))
    path = tmp_path / "memory.lineages"
    whole = json.loads(unseal("seeds", path.read_bytes()))
    for held in whole["lineages"].values():
        held["seeds"] = [[1, seed]]
    path.write_text(json.dumps(whole))
    with pytest.raises(RoundRefusedError, match="file of its lineages"):
        silo.earlier(at(2))


def test_seeds_that_are_not_handed_on_are_no_reason_to_ask_for_others(silo: SeedFile) -> None:
    silo.draw(at(1))
    # So long after its last round the client has no seed that is of use.
    with pytest.raises(BatonError, match="its own in this federation"):
        silo.key(at(20))


def test_the_file_counts_what_was_handed_on_as_the_memory_does(tmp_path: Path) -> None:
    first, second = (another(tmp_path, name) for name in "ab")
    for number, round in enumerate((1, 5), start=1):
        first.draw(at(round), handed=True)
        first.give(at(round + 1), second.key(at(round + 1)))
        (held,) = content(tmp_path / "a.lineages").values()
        assert (held["given"], held["seeds"]) == (number, [])


def test_a_silo_that_stays_has_its_own_seeds_by_age(silo: SeedFile) -> None:
    own = {round: silo.draw(at(round))[0] for round in (1, 2)}
    assert silo.draw(at(3))[1:] == (own[2], own[1], None)
    # It sits two rounds out: what is too old is forgotten.
    sixth = silo.draw(at(6))
    assert sixth[1:3] == (None, None)
    assert sixth[3] not in (None, *own.values())
    assert len({*own.values(), sixth[0], sixth[3]}) == 4


def test_noise_of_a_round_is_drawn_once(silo: SeedFile) -> None:
    silo.draw(at(5))
    for round in (5, 4, 1):
        with pytest.raises(RoundError, match="drawn"):
            silo.draw(at(round))
    silo.draw(at(6))


def test_another_run_or_protocol_has_other_seeds(silo: SeedFile) -> None:
    silo.draw(PLACE)
    for other in (replace(at(2), run="78"), replace(at(2), fingerprint=b"x" * 16)):
        assert silo.draw(other)[1:] == (None, None, None)
    assert silo.draw(at(2))[1] is not None


@pytest.mark.usefixtures("no_disk")
def test_what_is_held_stays_small_and_private(tmp_path: Path, silo: SeedFile) -> None:
    for run, round in itertools.product(range(32), (1, 2, 3, 4, 5)):
        silo.draw(replace(at(round), run=str(run)))
    path = tmp_path / "memory.lineages"
    held = content(path).values()
    assert len(held) == 16
    assert {len(each["seeds"]) for each in held} == {PLACE.bands - 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["memory", "memory.lineages"]


def test_a_lineage_goes_from_hand_to_hand(tmp_path: Path) -> None:
    first, second, third = (another(tmp_path, name) for name in "abc")
    one = first.draw(at(1), handed=True)[0]
    second.take(at(2), first.give(at(2), second.key(at(2))))
    two, *old = second.draw(at(2), handed=True)
    assert old == [one, None, None]
    third.take(at(3, 1), second.give(at(3, 1), third.key(at(3, 1))))
    assert third.draw(at(3), handed=True)[1:] == (two, one, None)
    # Nobody else has them.
    for gone in (first, second):
        assert gone.draw(at(3), handed=True)[1:] == (None, None, None)


def test_who_handed_its_seeds_on_has_them_no_longer(tmp_path: Path, silo: SeedFile) -> None:
    others = [another(tmp_path, name) for name in "ab"]
    silo.draw(at(1), handed=True)
    silo.give(at(2), others[0].key(at(2)))
    for round in (2, 3):
        with pytest.raises(BatonError, match="no noise"):
            silo.give(at(round), others[1].key(at(round)))
    assert content(tmp_path / "memory.lineages")[PLACE.federation.hex()]["seeds"] == []


def test_seeds_are_not_handed_on_for_a_round_they_were_used_in(tmp_path: Path, silo: SeedFile) -> None:
    """Two messages of that round would take the same noise away."""
    silo.draw(at(1), handed=True)
    silo.draw(at(2), handed=True)
    other = another(tmp_path, "other")
    for round in (1, 2):
        with pytest.raises(BatonError):
            silo.give(at(round), other.key(at(round)) if round == 1 else os.urandom(32))
    assert len(silo.give(at(3), other.key(at(3)))) == PLACE.baton_bytes


def test_seeds_are_not_used_before_the_round_they_were_taken_for(tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(4), handed=True)
    successor = another(tmp_path, "other")
    successor.take(at(5), silo.give(at(5), successor.key(at(5))))
    with pytest.raises(RoundError):
        successor.draw(at(4), handed=True)
    assert successor.draw(at(5), handed=True)[1] is not None


def test_without_leave_of_the_protocol_seeds_stay(tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(1))
    with pytest.raises(BatonError):
        silo.give(at(2), another(tmp_path, "other").key(at(2)))
    # Nor is a lineage gone on with that came from somebody else.
    other = another(tmp_path, "third")
    other.take(at(2), seal((b"x" * 16, None, None), other.key(at(2)), at(2)))
    assert other.draw(at(2))[1:] == (None, None, None)


def test_a_baton_is_taken_once(tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(1), handed=True)
    successor = another(tmp_path, "other")
    baton = silo.give(at(2), successor.key(at(2)))
    successor.take(at(2), baton)
    for round in (2, 3):
        with pytest.raises(BatonError, match="awaits no baton"):
            successor.take(at(round), baton)
    successor.draw(at(2), handed=True)
    with pytest.raises(BatonError, match="awaits no baton"):
        successor.take(at(2), baton)


def test_a_client_has_one_lineage(tmp_path: Path, silo: SeedFile) -> None:
    silo.key(at(1))
    for lineage in (0, 1):
        with pytest.raises(BatonError, match="before"):
            silo.key(at(1, lineage))
    silo.draw(at(1), handed=True)
    for round in (1, 2, 3, 4):
        with pytest.raises(BatonError, match="no second one"):
            silo.key(at(round))
    silo.key(at(5))  # what it held is out of reach by then


def test_a_server_that_lies_about_the_bands_ends_a_lineage_and_joins_none(tmp_path: Path, silo: SeedFile) -> None:
    """What a request says of b is the server's word: with b = 1 a client seems to hold nothing."""
    other = another(tmp_path, "other")
    mine = silo.draw(at(1), handed=True)[0]
    theirs = other.draw(at(1), handed=True)[0]
    silo.take(at(2), other.give(at(2), silo.key(replace(at(2), bands=1))))
    assert silo.draw(at(2), handed=True)[1:] == (theirs, None, None)  # one lineage, and no longer its own
    for client in (silo, other):
        assert mine not in client.draw(at(3), handed=True)
    # Nor does a longer baton hold more than there was, or a shorter one leave anything behind.
    silo.give(replace(at(4), bands=7), another(tmp_path, "third").key(replace(at(4), bands=7)))
    assert silo.draw(at(4), handed=True)[1:] == (None, None, None)


def test_what_is_wrong_changes_nothing(tmp_path: Path, silo: SeedFile) -> None:
    silo.draw(at(1), handed=True)
    path = tmp_path / "memory.lineages"
    before = path.read_bytes()
    for public in (bytes(32), b"short"):
        with pytest.raises(MessageError):
            silo.give(at(2), public)
    assert path.read_bytes() == before
    successor = another(tmp_path, "other")
    public = successor.key(at(2))
    before = (tmp_path / "other.lineages").read_bytes()
    right = silo.give(at(2), public)
    for baton in (right[:-1], bytes(len(right)), right[:-1] + bytes([right[-1] ^ 1])):
        with pytest.raises(CpsgdError):
            successor.take(at(2), baton)
    with pytest.raises(BatonError):
        successor.take(at(2, 1), right)
    assert (tmp_path / "other.lineages").read_bytes() == before
    successor.take(at(2), right)


INFINITE = (
    b'{"format": "cpsgd lineages 1", "lineages": {"00": {"used": Infinity, "seeds": [], "key": null, "handed": false, '
    b'"given": 0}}}'
)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": "cpsgd lineages 1"}', b"\xff", b"[" * 100_000, INFINITE]
)
def test_a_damaged_file_refuses(tmp_path: Path, silo: SeedFile, content: bytes) -> None:
    (tmp_path / "memory.lineages").write_bytes(content)
    for ask in (silo.draw, silo.key):
        with pytest.raises(RoundRefusedError, match="remove it") as caught:
            ask(PLACE)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_killed_at_any_moment_no_seed_is_used_twice(
    tmp_path: Path, silo: SeedFile, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either nothing left the client, and its seeds are as they were; or they are gone from the disk before."""
    silo.draw(at(1), handed=True)
    path = tmp_path / "memory.lineages"
    before = path.read_bytes()
    public = another(tmp_path, "other").key(at(2))

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    target = {"write": "json.dumps", "fsync": "os.fsync", "replace": "os.replace"}[step]
    for ask in (lambda: silo.draw(at(2), handed=True), lambda: silo.give(at(2), public)):
        with monkeypatch.context() as patched:
            patched.setattr(target, killed)
            with pytest.raises(KeyboardInterrupt):
                ask()
        assert path.read_bytes() == before
    # What was left half written is in nobody's way.
    assert silo.give(at(2), public)


def test_an_older_copy_of_the_file_holds_nothing_that_was_handed_on(tmp_path: Path, silo: SeedFile) -> None:
    """Restored by somebody, or by a disk that has lost the last change: the memory knows better."""
    path, other = tmp_path / "memory.lineages", another(tmp_path, "other")
    seed = silo.draw(at(1), handed=True)[0]
    older = path.read_bytes()
    other.take(at(2), silo.give(at(2), other.key(at(2))))
    path.write_bytes(older)
    assert silo.draw(at(2), handed=True)[1:] == (None, None, None)
    assert other.draw(at(2), handed=True)[1] == seed
    # Nor is a baton read again with a key that was kept.
    third = another(tmp_path, "third")
    public = third.key(at(3))
    older, baton = (tmp_path / "third.lineages").read_bytes(), other.give(at(3), public)
    third.take(at(3), baton)
    third.give(at(4), another(tmp_path, "fourth").key(at(4)))
    (tmp_path / "third.lineages").write_bytes(older)
    with pytest.raises(BatonError, match="awaits no baton"):
        third.take(at(3), baton)
    # What a client has drawn since counts, and is handed on as before.
    again = third.draw(at(5), handed=True)[0]
    assert third.draw(at(6), handed=True)[1] == again
    assert third.give(at(7), another(tmp_path, "fifth").key(at(7)))
    assert Memory(tmp_path / "third").rounds() == []


def test_a_client_killed_while_it_hands_on_has_nothing_twice(
    tmp_path: Path, silo: SeedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file and the memory: the next time it hands on, the memory says so, and older files are known."""
    path = tmp_path / "memory.lineages"
    silo.draw(at(1), handed=True)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    public = another(tmp_path, "other").key(at(2))
    with monkeypatch.context() as patched:
        patched.setattr("cpsgd.federation.client_files._Content.give", killed)
        with pytest.raises(KeyboardInterrupt):
            silo.give(at(2), public)
    assert silo.draw(at(2), handed=True)[1:] == (None, None, None)
    older = path.read_bytes()
    silo.give(at(3), another(tmp_path, "other").key(at(3)))
    path.write_bytes(older)
    assert silo.draw(at(3), handed=True)[1:] == (None, None, None)


def test_seeds_are_on_the_disk_before_they_are_known(silo: SeedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    kinds = {True: "folder", False: "file"}
    monkeypatch.setattr(
        "cpsgd.correlated.seeds.os.fsync", lambda file: synced.append(kinds[stat.S_ISDIR(os.fstat(file).st_mode)])
    )
    silo.draw(PLACE)
    assert synced[-2:] == ["file", "folder"]


@pytest.mark.usefixtures("no_disk")
def test_whatever_a_server_asks_no_seed_is_used_twice_in_a_round(tmp_path: Path) -> None:
    """The rule that privacy rests on: a server that asks anything of anybody in any order, keeps and repeats batons."""
    rng = np.random.default_rng(7)
    clients = [another(tmp_path, str(i)) for i in range(4)]
    used: Counter[tuple[int, bytes]] = Counter()
    drawn: Counter[bytes] = Counter()
    public, batons = [(os.urandom(32), at(1))], [(b"", at(1))]
    happened: Counter[str] = Counter()
    for turn in range(3000):
        client, place = clients[rng.integers(4)], at(turn // 50 + int(rng.integers(4)))
        try:
            match step := rng.choice(["draw", "key", "give", "take"]):
                case "draw":
                    own, *old = client.draw(place, handed=True)
                    assert own is not None
                    drawn[own] += 1
                    used.update((place.round, seed) for seed in (own, *old) if seed is not None)
                    happened["link"] += any(old)
                case "key":
                    public.append((client.key(place), place))
                case "give":
                    key, meant = public[-rng.integers(1, 4) % len(public)]
                    place = meant if rng.random() < 0.8 else place
                    batons.append((client.give(place, key), place))
                case _:
                    baton, meant = batons[-rng.integers(1, 4) % len(batons)]
                    client.take(meant if rng.random() < 0.8 else place, baton)
            happened[str(step)] += 1
        except CpsgdError:
            happened["refused"] += 1
    assert max(used.values()) == 1
    assert max(drawn.values()) == 1
    assert min(happened[step] for step in ("draw", "key", "give", "take", "link", "refused")) > 5


@pytest.mark.usefixtures("no_disk")
def test_a_server_that_hands_batons_on_as_it_should_or_twice(tmp_path: Path) -> None:
    """As before, with a server that mostly does the right thing, so that lineages are long, and then repeats itself."""
    rng = np.random.default_rng(8)
    clients = [another(tmp_path, str(i)) for i in range(5)]
    used: Counter[tuple[int, bytes]] = Counter()
    linked = 0
    for round in range(1, 40):
        giver, taker, third = (clients[i] for i in rng.permutation(5)[:3])
        seen: list[bytes] = []
        for one, other in ((giver, taker), (giver, third), (taker, third)):
            try:
                public = other.key(at(round))
                seen.append(one.give(at(round), public))
                other.take(at(round), seen[-1])
            except CpsgdError:
                pass
        for client, baton in itertools.product(clients, seen):
            with pytest.raises(CpsgdError):
                client.take(at(round), baton)
        for client in clients:
            if rng.random() < 0.7:
                try:
                    drawn = client.draw(at(round), handed=True)
                except RoundError:
                    continue
                used.update((round, seed) for seed in drawn if seed is not None)
                linked += any(drawn[1:])
    assert max(used.values()) == 1
    assert linked > 50
