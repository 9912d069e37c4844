"""What a conversion will do or did, for people (`--dry-run`, the summary) and for machines (`--json`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Report:
    """`files` maps every weight file below the output to its bytes; `seconds` is None for a plan that was not run."""

    action: str  # "import", "export" or "reshard"
    source: str
    output: str
    family: str
    format: str
    dtype: str
    tensors: int
    parameters: int
    bytes: int
    files: dict[str, int]
    layout: dict[str, Any] | None = None
    vocab_multiple: int | None = None
    key_style: str | None = None  # of the legacy format
    side_files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)  # key, value, origin, assumed: of a derived config
    largest_tensor: int = 0  # bytes
    workers: int = 1  # threads, of each process
    processes: int = 1
    peak_memory: int = 0  # bytes of the process, at the most
    estimated_seconds: float = 0.0  # at planning.ASSUMED_SPEED
    dry_run: bool = False
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
