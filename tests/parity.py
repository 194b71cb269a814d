"""How far our losses and advantages are from the peers': kept by the parity tests, printed in docs/numerics.md.

`pytest tests/test_*_parity.py --keep-parity` measures and keeps `parity.json`; `python tests/parity.py` writes the
tables from it, and with `--check` only compares. `make parity` does both.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE / "parity.json"
DOCUMENT = HERE.parent / "docs" / "numerics.md"
START, END = "<!-- parity:start -->", "<!-- parity:end -->"
UNMEASURED = "–"


class Parity:
    """Takes each case's largest difference; a case that is not among the kept ones fails until they are made anew."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.kept = kept()
        self.measured: dict[tuple[str, str, str], float] = {}

    def __call__(self, peer: str, what: str, option: str, difference: float, bound: float) -> None:
        """`peer` with its version names the table, `what` the row, `option` the column; fails beyond `bound`."""
        assert difference <= bound, f"{peer}, {what}, {option}: {difference:.1e} exceeds {bound:.0e}"
        case = (peer, what, option)
        self.measured[case] = max(difference, self.measured.get(case, 0.0))
        named = {(name.split()[0], *rest) for name, *rest in self.kept}
        assert self.keep or (peer.split()[0], what, option) in named, f"{case} is not kept: run `make parity`"

    def write(self) -> None:
        """Keeps what was measured, in the place of all that was kept of the same peers."""
        peers = {peer.split()[0] for peer, *_ in self.measured}
        others = {case: value for case, value in self.kept.items() if case[0].split()[0] not in peers}
        lines = [json.dumps([*case, float(f"{value:.1e}")]) for case, value in (others | self.measured).items()]
        KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def kept() -> dict[tuple[str, str, str], float]:
    """The kept differences, by peer, row and column."""
    return {(peer, what, option): value for peer, what, option, value in json.loads(KEPT.read_text())}


def tables(differences: dict[tuple[str, str, str], float]) -> str:
    """A table for each peer; rows and columns in the order in which they were measured."""
    return "\n\n".join(_table(peer, differences) for peer in unique(case[0] for case in differences))


def _table(peer: str, differences: dict[tuple[str, str, str], float]) -> str:
    cases = {(what, option): value for (name, what, option), value in differences.items() if name == peer}
    options = unique(option for _, option in cases)
    lines = [f"| {peer} | {' | '.join(options)} |", f"| --- {'| --- ' * len(options)}|"]
    for what in unique(what for what, _ in cases):
        cells = [_cell(cases.get((what, option))) for option in options]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(difference: float | None) -> str:
    return UNMEASURED if difference is None else f"{difference:.0e}" if difference else "0"


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def renewed(text: str) -> str:
    """`text` with what stands between the two markers replaced by the tables."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{DOCUMENT.name} needs the lines {START} and {END}, in this order")
    return f"{before}{START}\n{tables(kept())}\n{END}{after}"


if __name__ == "__main__":
    old = DOCUMENT.read_text()
    new = renewed(old)
    if "--check" not in sys.argv:
        DOCUMENT.write_text(new)
    elif new != old:
        sys.exit(f"{DOCUMENT.name} is behind {KEPT.name}: run `make parity`")
