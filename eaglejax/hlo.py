"""What an optimised XLA module keeps in memory: arrays that its instructions write, and how often.

Kernels read weights and caches where they lie. XLA is free to lay a copy beside them, or to unpack
a matrix before a product, and says so nowhere but here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

# These give a name to memory that another instruction wrote.
VIEWS = frozenset(
    (
        *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
        *("optimization-barrier", "add-dependency", "after-all", "partition-id", "replica-id"),
        *("copy-done", "async-done", "async-update"),
    )
)
UPDATES = frozenset(("scatter", "dynamic-update-slice"))  # written in place of an operand
COLLECTIVES = frozenset(
    (
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast"),
    )
)
LAUNCHES = frozenset(("fusion", "custom-call", "copy", "scatter", "sort", "select-and-scatter"))
FLOATS = frozenset(("f16", "bf16", "f32", "f64"))
BITS = {"pred": 8, "s4": 4, "u4": 4, "f16": 16, "bf16": 16}
NAMES = {"bool": "pred", "bfloat16": "bf16", "float": "f", "uint": "u", "int": "s"}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Buffer:
    """An array that an instruction writes.

    Attributes:
        name, opcode: of the instruction.
        dtype: HLO's name, `bf16`.
        shape: dimensions.
        in_place: it takes the memory of an operand; only some elements are written.
        times: how often a run of the module executes the instruction.
    """

    name: str
    opcode: str
    dtype: str
    shape: tuple[int, ...]
    in_place: bool
    times: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _bits(self.dtype) // 8

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.dtype}[{dims}] {self.opcode} {self.name}"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    result: str
    opcode: str
    rest: str

    def called(self, *attributes: str) -> Iterator[str]:
        """Computations named by attributes such as `body=`, or lists of them."""
        for attribute in attributes:
            for many, single in re.findall(
                rf"\b{attribute}=(?:\{{(.*?)\}}|%?([\w.\-]+))", self.rest
            ):
                yield from (name.strip(" %") for name in (single or many).split(","))


class Module:
    """An optimised HLO module, read from its text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.split("\n"):  # a kernel's own code may hold other line ends
            if start := COMPUTATION.match(line):
                current = self.computations[start[2]] = []
                self.entry = start[2] if start[1] else self.entry
            elif found := INSTRUCTION.match(line):
                current.append(_instruction(found[1], found[2]))
        if not self.entry:
            raise ValueError("no ENTRY computation: not the text of an HLO module")

    def executed(self) -> Iterator[tuple[Instruction, int]]:
        """Instructions that run on their own, not inside a fusion, and how often."""
        yield from self._executed(self.entry, 1)

    def _executed(self, computation: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for one in self.computations[computation]:
            yield one, times
            if one.opcode == "while":
                trips = TRIPS.search(one.rest)
                turns = int(trips[1]) if trips else 1
                for name in one.called("body", "condition"):
                    yield from self._executed(name, times * turns)
            elif one.opcode == "conditional":
                branches = ("branch_computations", "true_computation", "false_computation")
                for name in one.called(*branches):
                    yield from self._executed(name, times)
            elif one.opcode in ("call", "async-start"):
                for name in one.called("to_apply", "calls"):
                    yield from self._executed(name, times)

    def buffers(self) -> Iterator[Buffer]:
        """Arrays that are written, in the order of the text."""
        for one, times in self.executed():
            if one.opcode in VIEWS:
                continue
            in_place = (
                one.opcode in UPDATES
                or "output_to_operand_aliasing" in one.rest
                or (one.opcode == "fusion" and self._updates(one))
            )
            for dtype, dims in ARRAY.findall(one.result):
                shape = tuple(int(n) for n in dims.split(",") if n)
                yield Buffer(one.name, one.opcode, dtype, shape, in_place, times)

    def _updates(self, fusion: Instruction) -> bool:
        """Whether a fusion only writes elements of its operands: all its results are updates."""
        for name in fusion.called("calls"):
            body = {one.name: one for one in self.computations[name]}
            root = self.computations[name][-1]
            roots = [root]
            if root.opcode == "tuple":
                roots = [body[n] for n in re.findall(r"%?([\w.\-]+)", root.rest) if n in body]
            for one in roots:
                while one.opcode == "bitcast":
                    one = body[re.findall(r"%?([\w.\-]+)", one.rest)[0]]
                if one.opcode not in UPDATES:
                    return False
            return True
        return False

    def collectives(self) -> dict[str, int]:
        """How often each kind of collective runs."""
        counts: dict[str, int] = {}
        for one, times in self.executed():
            kind = one.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                counts[kind] = counts.get(kind, 0) + times
        return counts

    def launches(self) -> int:
        """How many kernels and copies a run launches, about: what is not a view or a constant."""
        return sum(times for one, times in self.executed() if one.opcode in LAUNCHES)


def dequantised(module: Module, matrices: Iterable[tuple[int, int]]) -> list[Buffer]:
    """Buffers that hold a matrix unpacked: floats of its shape, or a level a byte.

    Args:
        module: what was compiled.
        matrices: `[K, N]` of every quantised matrix; a whole layer or stack of them counts as well.
    """
    shapes = {tuple(sorted(m)) for m in matrices}
    found = []
    for buffer in module.buffers():
        dims = tuple(sorted(n for n in buffer.shape if n > 1))
        matrix = any(_is_matrix(dims, shape) for shape in shapes)
        if matrix and (buffer.dtype in FLOATS or buffer.dtype in ("s8", "u8", "s32", "u32")):
            found.append(buffer)
    return found


def _is_matrix(dims: tuple[int, ...], matrix: tuple[int, ...]) -> bool:
    """Whether sorted dimensions are a matrix's, or those of a stack of it."""
    if dims == matrix:
        return True
    rest = list(dims)
    for n in matrix:
        if n not in rest:
            return False
        rest.remove(n)
    return len(rest) == 1


def copies(module: Module, stacks: Iterable[Any]) -> list[Buffer]:
    """Buffers as large as a layer of a stack, or all of it, and of its type; in-place writes aside.

    Args:
        module: what was compiled.
        stacks: arrays or shapes `[L, ...]`, packed weights and caches.
    """
    sizes: dict[tuple[int, bool], str] = {}
    for stack in stacks:
        name = _hlo_name(stack.dtype)
        layer = math.prod(stack.shape[1:]) * _bits(name) // 8
        for size in (layer, layer * stack.shape[0]):
            sizes[size, name in FLOATS] = name
    return [
        buffer
        for buffer in module.buffers()
        if not buffer.in_place
        and (buffer.nbytes, buffer.dtype in FLOATS) in sizes
        # Bytes may be viewed as nibbles or wider words; a float stays what it is.
        and (buffer.dtype not in FLOATS or sizes[buffer.nbytes, True] == buffer.dtype)
    ]


def _instruction(name: str, text: str) -> Instruction:
    """Splits `result opcode(rest`; a result may be a tuple, which holds spaces."""
    end = 0
    if text.startswith("("):
        depth = 0
        for end, letter in enumerate(text):  # noqa: B007
            depth += (letter == "(") - (letter == ")")
            if not depth:
                break
        end += 1
    else:
        end = text.index(" ")
    opcode = OPCODE.match(text, end)
    if opcode is None:
        raise ValueError(f"instruction {name}: no opcode in {text[:80]!r}")
    return Instruction(name, text[:end], opcode[1], text[opcode.end() :])


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 32


def _hlo_name(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    for long, short in NAMES.items():
        if name.startswith(long):
            return name.replace(long, short)
    return name
