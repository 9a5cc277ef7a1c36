"""What of one program is fused, as plain data: known once it is recorded, and in no plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Fusing:
    """Every recorded segment of a program: fused, or why not.

    Attributes:
        sizes: (symbol, value) of the program's key.
        fused: (segment, number of the compilation that made it), alike where the numbers are equal.
        unfused: (segment, reason) of those recorded as they are.
    """

    sizes: tuple[tuple[str, int], ...]
    fused: tuple[tuple[int, int], ...]
    unfused: tuple[tuple[int, str], ...]
