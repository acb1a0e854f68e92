"""The checks of an audit, one after another."""

from typing import Any

import numpy as np

from mxflash._audit.compare import Difference, Tally, difference
from mxflash._audit.layout import Document, Layout
from mxflash._audit.mask import check_mask, planned_runs
from mxflash._audit.probes import KINDS, TARGETS, Probes
from mxflash._audit.report import Check, Report
from mxflash._audit.rounding import tolerances
from mxflash._audit.subject import Subject
from mxflash._audit.values import check_accuracy, check_finite, check_row_sum, check_spread

_LEAST_ROUNDS = 10
"""Every kind of change, of all tensors and of one."""
_REPEATS = 2


class Auditor:
    """Runs the subject on changed inputs and compares."""

    def __init__(self, subject: Subject, probes: int, reach: int, seed: int, progress: Any):
        for name, values in subject.inputs.items():
            if not np.isfinite(values).all():
                raise ValueError(f"{name}: NaN or Inf given, finite values allowed (the audit puts in its own)")
        self._subject = subject
        self._layout = subject.layout
        self._probes = Probes(subject.inputs, subject.largest, subject.smallest_normal, seed)
        self._wanted = probes
        self._reach = reach
        self._progress = progress
        self._overflow: dict[tuple[bool, str, str], int] = {}
        self._steps = 0
        self._steps_in_all = 1

    def run(self, name: str) -> Report:
        """All checks."""
        subject, documents = self._subject, self._layout.documents
        long_enough = [index for index, one in enumerate(documents) if one.queries > 1]
        rounds = max(_LEAST_ROUNDS, -(-self._wanted // max(len(long_enough), 1))) if long_enough else 0
        self._steps_in_all = (
            rounds + 28 + 4 * (max(len(documents), 1) - 1).bit_length() + planned_runs(self._layout, subject.o_shape[2])
        )
        self._before = subject.run(subject.inputs)
        self._advance()
        self._exact = subject.exact()
        units = subject.scale, subject.roundoff, subject.tiny
        self._tolerances = tolerances(subject.inputs, self._exact, self._layout, *units)
        self._advance()
        report = Report(name, self._problem())
        determinism, self._noise = self._determinism()
        others = self._other_documents()
        place = self._place()
        # A change in one document must not be taken for one in another: where documents meet, one changes at a time.
        if others.result == "fails" and long_enough:
            groups = [[index] for index in self._probes.random.permutation(long_enough)]
            rounds = max(_LEAST_ROUNDS, self._wanted)
        else:
            groups = [long_enough]
        later = self._later_tokens(groups, rounds)
        mask, note = check_mask(subject, self._probes.random, self._advance)
        report.checks = [
            check_finite(subject, self._before),
            *later,
            others,
            place,
            determinism,
            check_spread(subject, self._before, self._probes, self._overflow, self._advance),
            check_row_sum(subject, self._probes, self._advance),
            mask,
            check_accuracy(subject, self._before, self._exact),
        ]
        report.findings = [f"{check.name}: {check.seen}" for check in report.checks if check.result == "fails"]
        report.notes = [note] if note else []
        if any(noise > 1 for noise in self._noise.values()):
            report.notes.append(
                "the same input gave results that differ beyond rounding: the other checks count only what moved by "
                "more than four times that noise."
            )
        if self._progress:
            self._progress(1.0)
        return report

    def _advance(self) -> None:
        self._steps += 1
        if self._progress:
            self._progress(min(self._steps / self._steps_in_all, 1.0))

    def _run(self, tensors: dict, layout: Layout | None = None) -> dict[str, np.ndarray]:
        after = self._subject.run(tensors, layout)
        self._advance()
        return after

    def _problem(self) -> dict[str, Any]:
        shape, left, right = self._subject.inputs["k"].shape, *self._layout.mask
        return {
            "tokens_q": self._subject.o_shape[0],
            "tokens_k": shape[0],
            "documents": len(self._layout.documents),
            "heads": self._subject.o_shape[1],
            "kv_heads": shape[1],
            "head_dim": shape[2],
            "value_dim": self._subject.o_shape[2],
            "dtype": self._subject.dtype,
            "causal": right is not None and right <= 0,
            "window": None if left is None and right in (None, 0) else [left, right],
            "backward": bool(self._subject.differentiates),
        }

    def _found(self, output: str, after: dict, rows: slice, moved_to: slice | None = None) -> Difference:
        """Of these rows before and after; they may have moved to other places in the pack."""
        now = after[output][moved_to or rows]
        return difference(self._before[output][rows], now, self._tolerances[output][rows])

    def _determinism(self) -> tuple[Check, dict[str, float]]:
        """And each output's own noise: what the other checks must allow for."""
        tally, noise = Tally(), dict.fromkeys(self._before, 1.0)
        for _ in range(_REPEATS):
            after = self._run(self._subject.inputs)
            tally.begin()
            for output in self._before:
                for index, document in enumerate(self._layout.documents):
                    found = self._found(output, after, document.rows(output))
                    tally.add(output, found, document, {"document": index}, 1.0)
                    noise[output] = max(noise[output], 4 * float(found.excess.max(initial=0)))
        if not tally.moved:
            return Check("determinism", "holds", f"the same bits {_REPEATS + 1} times", tally.figures()), noise
        within = "beyond what rounding explains" if tally.leaks else "within rounding"
        words = f"{tally.worst_words('from one call to the next')}, {within}"
        return Check("determinism", "fails", words, tally.figures()), noise

    def _other_documents(self) -> Check:
        """Half of the documents become others, the rest must not move; any two are apart in some of the halves."""
        documents, tally = self._layout.documents, Tally()
        bits = [1 << place for place in range((len(documents) - 1).bit_length())]
        halves = [(bit, value) for bit in bits for value in (0, bit)]
        for kind in ("resample", "outlier"):
            for bit, changed in halves:
                tensors = self._probes.copy()
                for index, document in enumerate(documents):
                    if index & bit == changed:
                        self._probes.change(tensors, "all", kind, document.q, document.k)
                after = self._run(tensors)
                tally.begin()
                for index, document in enumerate(documents):
                    if index & bit != changed:
                        self._compare_document(tally, after, index, document, {"perturbation": kind})
        cause = "with the contents of other documents"
        return self._check("other documents", tally, cause, "exchanges", "there is one document")

    def _place(self) -> Check:
        """The same documents in other orders: each must keep its results."""
        documents, tally = self._layout.documents, Tally()
        count = len(documents)
        orders = [[*range(1, count), 0], [*reversed(range(count))]] if count > 1 else []
        for order in orders[: 1 if count == 2 else 2]:
            layout = self._layout.moved(order)
            tensors = {}
            for name, values in self._subject.inputs.items():
                rows = [documents[index].q if name in ("q", "do") else documents[index].k for index in order]
                tensors[name] = np.concatenate([values[row] for row in rows])
            after = self._run(tensors, layout)
            tally.begin()
            for index, moved_to in zip(order, layout.documents, strict=True):
                self._compare_document(tally, after, index, moved_to, {})
        cause = "with the document's place in the pack"
        return self._check("place in the pack", tally, cause, "orders", "there is one document")

    def _compare_document(self, tally: Tally, after: dict, index: int, moved_to: Document, place: dict) -> None:
        document = self._layout.documents[index]
        for output in self._before:
            found = self._found(output, after, document.rows(output), moved_to.rows(output))
            if "perturbation" in place:
                self._add(tally, output, found, document, {"document": index, **place}, own=False)
            else:
                tally.add(output, found, document, {"document": index}, self._noise[output])

    def _add(
        self, tally: Tally, output: str, found: Difference, document: Document, place: dict[str, Any], own: bool
    ) -> None:
        """Counts finite changes. NaN of an outlier that overflows, as in float16, is for check_spread to report."""
        if found.lost.any():
            key = own, "outliers that overflow", output
            self._overflow[key] = max(self._overflow.get(key, 0), int(found.lost.sum()))
        tally.add(output, found.where(~found.lost), document, place, self._noise[output])

    def _later_tokens(self, groups: list[list[int]], rounds: int) -> list[Check]:
        """A token and later ones change; results before it that cannot see them must not move."""
        forward, backward = Tally(), Tally()
        targets = TARGETS if self._subject.differentiates else TARGETS[:-1]
        for step in range(rounds):
            kind = KINDS[step % len(KINDS)]
            target = targets[(step + step // len(KINDS)) % len(targets)]
            tensors = self._probes.copy()
            changed = []
            for index in groups[step % len(groups)]:
                document = self._layout.documents[index]
                token = self._probes.position(document.queries)
                changed.append((index, token, *self._probes.change_later(tensors, target, kind, document, token)))
            after = self._run(tensors)
            for index, token, queries, keys in changed:
                document = self._layout.documents[index]
                stay = ~self._layout.may_move(document, queries, keys)[0]
                stay[token:] = False
                if not stay.any():
                    continue
                place = {"document": index, "perturbed": token, "tensor": target, "perturbation": kind}
                outputs = [output for output in ("o", "lse") if output in self._before and target != "do"]
                if outputs:
                    self._compare_earlier(forward, outputs, after, document, stay, place)
                if self._subject.differentiates:
                    self._compare_earlier(backward, ["dq"], after, document, stay, place)
        checks = []
        for name, tally in (("later tokens, forward", forward), ("later tokens, backward", backward)):
            none = "no row that cannot see a later token"
            if tally is backward and not self._subject.differentiates:
                none = "no gradients"
            checks.append(self._check(name, tally, "with tokens it cannot see", "probes", none))
        return checks

    def _compare_earlier(
        self, tally: Tally, outputs: list[str], after: dict, document: Document, stay: np.ndarray, place: dict
    ) -> None:
        tally.begin()
        for output in outputs:
            found = self._found(output, after, document.q)
            self._add(tally, output, found.where(stay[:, None]), document, place, own=True)

    def _check(self, name: str, tally: Tally, cause: str, unit: str, none: str) -> Check:
        if tally.result == "not checked":
            return Check(name, "not checked", none)
        if tally.result == "exact":
            return Check(name, "exact", f"nothing moved in {tally.probes} {unit}", tally.figures())
        reach = f", up to {tally.reach} tokens back{tally.inside()}" if "perturbed" in tally.worst else ""
        count = f"{tally.leaks or tally.moved} of {tally.probes} {unit}"
        allowed = tally.result == "fails" and "perturbed" in tally.worst and tally.reach <= self._reach
        return Check(
            name,
            "in reach" if allowed else tally.result,
            f"{tally.worst_words(cause)}, in {count}{reach}",
            tally.figures(),
        )
