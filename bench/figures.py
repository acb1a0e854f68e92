"""The arithmetic of the comparison: orders, work, statistics, tables. The standard library alone, so that the unit
tests need no peer."""

import itertools
import statistics

FLOPS_FORWARD = "4 heads pairs head_dim"
FLOPS_BOTH = "14 heads pairs head_dim (forward 2 products, backward 5)"
PHASES = {"forward": 4, "forward+backward": 14}


def order(count, turn):
    """The contestants' order in a round: each starts in turn, and every other round runs backwards, so that none always
    follows the same one."""
    rotated = [(turn // 2 + i) % count for i in range(count)]
    return rotated if turn % 2 == 0 else rotated[::-1]


def lengths_of(offsets):
    return [end - begin for begin, end in itertools.pairwise(offsets)]


def causal_pairs(lengths):
    return sum(length * (length + 1) // 2 for length in lengths)


def flops(phase, heads, lengths, head_dim):
    return PHASES[phase] * heads * causal_pairs(lengths) * head_dim


def groups_by_length(lengths):
    """Documents of equal length, which one batched call can take, in order of first appearance."""
    groups = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    return list(groups.values())


def summary(samples):
    """Milliseconds: median, extremes, and the distance of the quartiles."""
    if not samples:
        raise ValueError("samples: none given, at least one allowed")
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {
        "samples": len(samples),
        "median_ms": statistics.median(samples),
        "min_ms": min(samples),
        "max_ms": max(samples),
        "quartile_distance_ms": quartiles[2] - quartiles[0],
        "samples_ms": list(samples),
    }


def number(value):
    """Three significant digits, never in scientific notation."""
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text or abs(value) >= 1000 else text


def time_cell(result):
    if result is None:
        return "-"
    return (
        f"{number(result['median_ms'])} ({number(result['min_ms'])}..{number(result['max_ms'])}; "
        f"{number(result['quartile_distance_ms'])})"
    )


def rate_cell(result, ceiling):
    """GFLOP/s of the median, and its share of a ceiling in GFLOP/s."""
    if result is None:
        return "-"
    rate = result["flops"] / result["median_ms"] / 1e6
    return f"{number(rate)} ({100 * rate / ceiling:.0f} %)"


def markdown(header, rows, left=1):
    """A table; the first `left` columns are aligned left, the others right."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"row: {len(row)} cells given, {len(header)} allowed: {row}")
    marks = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, marks, *rows])


def documents_text(lengths):
    if min(lengths) == max(lengths):
        return f"{len(lengths)} of {lengths[0]}"
    middle = statistics.median(lengths)
    return f"{len(lengths)} of {min(lengths)}..{max(lengths)}, median {number(middle)}"


def peak_share(peak_bytes, base_bytes, tensor_bytes):
    """What a call holds beyond an idle process, as a multiple of its inputs and outputs."""
    return (peak_bytes - base_bytes) / tensor_bytes
