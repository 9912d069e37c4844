"""Figures of the server in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
RECENT = 32  # requests whose duration says how long a refused client had better wait


class Histogram:
    """Durations, counted by upper bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip([*BOUNDS_S, "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """What was asked and answered since the start. Used in the server's event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._duration, self._first_token = Histogram(), Histogram()
        self.prompt_tokens = 0

    def request(self, path: str, status: int) -> None:
        """A request was answered; 499 stands for a client that left."""
        self._requests[path, status] += 1

    def answered(self, seconds: float) -> None:
        """A text was sampled to its end, in so much time from the request on."""
        self._duration.add(seconds)
        self._recent.append(seconds)

    def first_token(self, seconds: float) -> None:
        """A request's first tokens were committed, so long after it came."""
        self._first_token.add(seconds)

    @property
    def retry_after_s(self) -> int:
        """How long a client had better wait when the queue is full."""
        mean = sum(self._recent) / len(self._recent) if self._recent else 1.0
        return min(max(round(mean), 1), 60)

    def text(self, *, waiting: int, running: int, tokens: int, forwards: int) -> str:
        """All figures; the arguments are the scheduler's."""
        prefix = "dlm_bridge"
        requests = [
            f'{prefix}_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        blocks = [
            _block(f"{prefix}_requests_total", "counter", "Requests, by path and status.", requests),
            *(
                _block(f"{prefix}_{name}", kind, about, [f"{prefix}_{name} {value}"])
                for name, kind, about, value in (
                    ("queue_rows", "gauge", "Rows that wait.", waiting),
                    ("running_rows", "gauge", "Rows that are sampled.", running),
                    ("prompt_tokens_total", "counter", "Tokens of accepted prompts.", self.prompt_tokens),
                    ("generated_tokens_total", "counter", "New tokens of complete rows.", tokens),
                    ("forwards_total", "counter", "Forward passes of the model.", forwards),
                )
            ),
            *(
                _block(f"{prefix}_{name}", "histogram", about, histogram.lines(f"{prefix}_{name}"))
                for name, about, histogram in (
                    ("request_seconds", "From a request to its last token.", self._duration),
                    ("first_token_seconds", "From a request to its first committed token.", self._first_token),
                )
            ),
        ]
        return "".join(blocks)


def _block(name: str, kind: str, about: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines, ""])
