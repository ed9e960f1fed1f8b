"""Is one log-prob column a position early or late?"""

from __future__ import annotations

from typing import Any, ClassVar

from estr_diag.checks.base import Finding
from estr_diag.store.database import Store

_SEQUENCES = 256
_ENOUGH_TOKENS = 100
_ALIGNED = 0.5
_SHIFTS = (-2, -1, 1, 2)


class ShiftedColumn:
    """Does the training engine's column match the inference engine's better at another position?

    Two engines that score the same token agree to a correlation near 1. A column that sits one
    position early correlates near 0 with its own position and near 1 after the shift.
    """

    id: ClassVar[str] = "shifted_column"

    def run(self, store: Store, present: frozenset[str]) -> Finding:
        """Correlate the columns at shifts -2..2 on up to 256 sequences, chosen by hash."""
        action = (
            "shift the column by the value found (mapping.toml [shift], or the hook that wrote it) and ingest again"
        )
        if not {"logp_infer", "logp_train"} <= present:
            return Finding(
                self.id, "cannot_tell", "fatal", "logp_train", "one of the two engines' columns is missing", action
            )
        shifted = ", ".join(
            f"{'lead' if s > 0 else 'lag'}(logp_train, {abs(s)}) over w as t{i}" for i, s in enumerate(_SHIFTS)
        )
        correlations = ", ".join(f"corr(logp_infer, t{i}) filter (loss_mask) as r{i}" for i in range(len(_SHIFTS)))
        row = store.rows(
            f"""
            with chosen as (select seq_id from sequences order by hash(seq_id), seq_id limit {_SEQUENCES}),
            shifted as (
                select loss_mask, logp_infer::double as logp_infer, logp_train::double as t, {shifted}
                from tokens semi join chosen using (seq_id)
                window w as (partition by seq_id order by pos)
            )
            select count(*) filter (loss_mask and logp_infer is not null and t is not null) as n,
                   corr(logp_infer, t) filter (loss_mask) as here, {correlations}
            from shifted
            """
        )[0]
        here = _finite(row["here"])
        others = {s: _finite(row[f"r{i}"]) for i, s in enumerate(_SHIFTS)}
        best, value = max(others.items(), key=lambda item: item[1] if item[1] is not None else -2.0)
        if row["n"] < _ENOUGH_TOKENS or here is None or value is None:
            return Finding(
                self.id,
                "cannot_tell",
                "fatal",
                "logp_train",
                f"{row['n']} tokens; a shift needs {_ENOUGH_TOKENS}",
                "log more tokens",
            )
        found = value > _ALIGNED and value > here + (1 - here) / 2
        evidence: list[dict[str, Any]] = [
            {"shift": 0, "correlation": here},
            *({"shift": s, "correlation": r} for s, r in others.items()),
        ]
        if not found:
            return Finding(
                self.id, "clear", "fatal", "logp_train", f"correlation {here:.3f} in place, {value:.3f} at the best shift", "",
                size=value, control=here, evidence=evidence,
            )  # fmt: skip
        return Finding(
            self.id, "found", "fatal", "logp_train",
            f"the column sits {abs(best)} position(s) {'late' if best > 0 else 'early'}: "
            f"correlation {here:.2f} in place, {value:.2f} after moving it",
            action, size=value, control=here, evidence=evidence, spoils=("logp_train",),
        )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return None if value is None or value != value else value
