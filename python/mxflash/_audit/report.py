"""What an audit has to say."""

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Check:
    """One check of an audit."""

    name: str
    """later tokens, forward; later tokens, backward; other documents; place in the pack; determinism; NaN and Inf;
    row sum; mask; finite; accuracy."""
    result: str
    """exact (the same bits), rounding (within what rounding explains), noise (within what the same input gives),
    in reach (moved, no further back than allowed), holds, fails, measured (no verdict), or not checked."""
    seen: str
    """What was seen, in words."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same in numbers."""


@dataclass
class Report:
    """The result of an audit. str() is its table."""

    name: str
    problem: dict[str, Any]
    """tokens_q, tokens_k, documents, heads, kv_heads, head_dim, value_dim, dtype, causal, window, backward."""
    checks: list[Check] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """One sentence for each check that fails."""
    notes: list[str] = field(default_factory=list)
    """What bounds the audit: what was not covered, what noise it had to allow for."""

    @property
    def holds(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def check(self, name: str) -> Check:
        """The check of that name; KeyError where there is none."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def table(self, width: int = 130) -> str:
        """A plain-text table of the checks and the notes, in lines of at most `width` characters."""
        problem = self.problem
        mask = f"window {problem['window']}" if problem["window"] else "causal" if problem["causal"] else "full"
        lines = [
            f"audit of {self.name}: {'holds' if self.holds else 'does not hold'}",
            f"{problem['documents']} documents, {problem['tokens_q']} queries and {problem['tokens_k']} keys, "
            f"{problem['heads']} heads on {problem['kv_heads']}, dimensions {problem['head_dim']} and "
            f"{problem['value_dim']}, {problem['dtype']}, {mask}, "
            f"{'forward and backward' if problem['backward'] else 'forward alone'}",
            "",
        ]
        names = max(len(check.name) for check in self.checks)
        results = max(len(check.result) for check in self.checks)
        indent = names + results + 4
        for check in self.checks:
            start = f"{check.name:{names}}  {check.result:{results}}  "
            lines += textwrap.wrap(start + check.seen, width, subsequent_indent=" " * indent, drop_whitespace=True)
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", width, subsequent_indent="  ")]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {"holds": self.holds, **asdict(self)}

    def to_json(self) -> str:
        """to_dict() as text; numbers that are not finite become null."""
        return json.dumps(_finite(self.to_dict()), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
