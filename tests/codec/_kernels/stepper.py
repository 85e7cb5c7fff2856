"""Runs a client's kernel one instruction at a time and describes its path (see test_trace.py).

    python stepper.py values|packed|elsewhere TRIALS P
    python stepper.py values|packed coins COINS
    python stepper.py values|packed gaussian|lineage SIGMA
    python stepper.py sum gaussian SIGMA

The kernel runs in forked children that differ in nothing but the keystream and the vector they find in shared memory.
The parent stops a child before every instruction and, inside the compiled module, records which it is and what the
registers hold that it addresses memory by, according to the disassembler. One line is printed for the smallest values,
one for the largest, one for random ones: the number of instructions, a digest of which they were, one of the addresses.
With "elsewhere" the values are written to a place that depends on the first byte of the keystream: this must show.
Ends with FORBIDDEN where the system does not let one process trace another.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import mmap
import os
import re
import signal
import subprocess
import sys

import numpy as np

from cpsgd.codec import pack
from cpsgd.codec._kernels import _native
from cpsgd.codec.rounding import FINER_DRAW_BYTES, FinerGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian, fine_gaussian

COUNT = 64
FORBIDDEN = 77
_TRACEME, _SINGLESTEP, _GETREGS = 0, 9, 12
# The first of the 27 words of Linux's user_regs_struct for x86-64; what follows addresses no memory.
_FIELDS = ["r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"]
_FIELDS += ["orig_rax", "rip", "cs", "eflags", "rsp"]
_REGISTERS = {name: position for position, name in enumerate(_FIELDS)}
_INSTRUCTION = re.compile(r" *([0-9a-f]+):\t(\S+)(.*)")
_OPERAND = re.compile(r"\((%\w+)?(?:,(%\w+))?(?:,\d)?\)")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, process: int, data: object = None) -> None:
    if _libc.ptrace(request, process, None, data) == -1:
        if ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            os._exit(FORBIDDEN)
        raise OSError(ctypes.get_errno(), "ptrace")


def _module_start() -> int:
    path = os.path.realpath(_native.__file__)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return min(int(line.split("-")[0], 16) for line in maps if line.split()[-1] == path)


def _address_registers() -> dict[int, tuple[int, ...]]:
    """For every instruction, by its distance from the module's start: the registers it addresses memory by.

    A vector register among them (a gather) is a KeyError. Calls and pushes use the stack pointer, which all children
    share as long as they run the same instructions.
    """
    command = ["objdump", "-d", "--no-show-raw-insn", _native.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {}
    for match in filter(None, map(_INSTRUCTION.match, listing.stdout.splitlines())):
        offset, mnemonic, operands = match.groups()
        computes_only = mnemonic.startswith("lea") or "nop" in mnemonic + operands
        used = [] if computes_only else [name for pair in _OPERAND.findall(operands) for name in pair if name]
        found[int(offset, 16)] = tuple(_REGISTERS[name.removeprefix("%")] for name in used)
    return found


def _shared(count: int, dtype: type[np.generic]) -> np.ndarray:
    """An array that the parent can still fill when its children are waiting to read it."""
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize), dtype=dtype)


def _wait() -> None:
    _ptrace(_TRACEME, 0)
    signal.raise_signal(signal.SIGSTOP)


def _follow(child: int, code: dict[int, tuple[int, ...]]) -> tuple[int, str, str]:
    """How many instructions of the module the child takes until it ends, which, and with what addresses."""
    start = _module_start()
    registers = (ctypes.c_ulonglong * 27)()
    instructions, addresses, steps = hashlib.sha256(), hashlib.sha256(), 0
    _, status = os.waitpid(child, 0)
    while not os.WIFEXITED(status):
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"the traced process ended with status {status}")
        _ptrace(_GETREGS, child, registers)
        place = registers[_REGISTERS["rip"]] - start
        if place in code:
            instructions.update(place.to_bytes(8, "little"))
            for register in code[place]:
                addresses.update(registers[register].to_bytes(8, "little"))
            steps += 1
        _ptrace(_SINGLESTEP, child)
        _, status = os.waitpid(child, 0)
    if os.WEXITSTATUS(status) == FORBIDDEN:
        os._exit(FORBIDDEN)
    return steps, instructions.hexdigest(), addresses.hexdigest()


def main() -> None:
    kind = sys.argv[1]
    mechanism: Mechanism
    if sys.argv[2] == "coins":
        mechanism = Coins(coins=int(sys.argv[3]), theta=0.12, coordinate_range=1.0)
    elif sys.argv[2] == "gaussian":
        mechanism = RoundedGaussian(noise_deviation=float(sys.argv[3]), step=1.0, window=24, coordinate_range=1.0)
    elif sys.argv[2] == "lineage":
        mechanism = RoundedCorrelated(
            noise_deviation=float(sys.argv[3]),
            step=1.0,
            window=32,
            coordinate_range=1.0,
            inherited_range=4.0,
            bands=2,
            run_length=2,
        )
    else:
        mechanism = Binomial(levels=2, trials=int(sys.argv[2]), p=float(sys.argv[3]), coordinate_range=1.0)
    assert mechanism.grid is not None
    kernel, size = mechanism.kernel(), mechanism.keystream_bytes * COUNT
    if kind == "sum":
        table = fine_gaussian.table(15.0, fine_gaussian.farthest(15.0))
        finer, size = FinerGaussian(table.high, table.low), FINER_DRAW_BYTES * COUNT
    grid, words, out = _shared(COUNT, np.float32), _shared(size, np.uint8), _shared(COUNT + 255, np.uint32)
    radix = mechanism.values
    grouping, packed = pack.grouping(radix).arguments(COUNT), _shared(pack.payload_bytes(COUNT, radix), np.uint8)

    def run() -> None:
        if kind == "sum":
            finer.draw(words, out[:COUNT].view(np.int32))
        elif kind == "packed":
            kernel.packed(grid, words, *grouping, packed)
        else:
            start = int(words[0]) if kind == "elsewhere" else 0
            kernel.values(grid, words, out[start : start + COUNT])

    generator = np.random.default_rng(0)
    keystreams = [0, 255, generator.integers(0, 256, size)]
    limit = mechanism.grid.limit
    code = _address_registers()
    run()  # whatever happens at the first call only
    # All children begin before anything differs, so that even what they allocate lies at the same addresses. The first,
    # in whose time this loop warms up, only serves that.
    children = (ctypes.c_int * (1 + len(keystreams)))()
    gc.disable()
    for number in range(len(children)):
        children[number] = os.fork()
        if children[number] == 0:
            _wait()
            run()
            os._exit(0)
    os.kill(children[0], signal.SIGKILL)
    for child, keystream in zip(children[1:], keystreams, strict=True):
        words[:] = keystream
        grid[:] = generator.uniform(-2 * limit, 2 * limit, COUNT)
        print(*_follow(child, code))


if __name__ == "__main__":
    main()
