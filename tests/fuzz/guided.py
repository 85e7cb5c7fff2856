"""One target fuzzed by libFuzzer in its own process: `PYTHONPATH=tests python -m fuzz.guided TARGET INPUTS SEED`."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped]

# Only our own code is watched: instrumenting PyTorch would take minutes and lead the search astray.
with atheris.instrument_imports(include=["cpsgd"]):
    from .driver import check, limited_memory
    from .mutations import LONGEST
    from .targets import TARGETS, folder


def main() -> None:
    """Runs libFuzzer, which ends the process."""
    name, inputs, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    target = next(target for target in TARGETS if target.name == name)
    corpus, words = folder() / "corpus", folder() / "words"
    corpus.mkdir()
    for number, data in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(data)
    lines = ["".join(f"\\x{byte:02x}" for byte in token) for token in target.tokens]
    words.write_text("".join(f'"{line}"\n' for line in lines))

    def change(data: bytes, longest: int, seed: int) -> bytes:
        changed: bytes = atheris.Mutate(data, longest)
        return target.seal(changed)[:longest] if seed % 2 else changed

    options = [
        *(f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={LONGEST}", "-timeout=10", "-print_final_stats=1"),
        *(f"-artifact_prefix={folder()}/", str(corpus)),
    ]
    if target.tokens:
        options.append(f"-dict={words}")
    atheris.Setup([sys.argv[0], *options], lambda data: check(target, data), custom_mutator=change)
    with limited_memory():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
