"""The tables of differences to the peers: made of the kept measurements, all of them; what is refused."""

import subprocess
import sys

import pytest

import parity as module
from parity import DOCUMENT, KEPT, Parity, kept, tables


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the sources are not here: a wheel is tested")
def test_the_documents_hold_the_kept_differences():
    check = [sys.executable, KEPT.with_name("parity.py"), "--check"]
    done = subprocess.run(check, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [cell for line in tables(kept()).splitlines() for cell in line.split("|")[2:-1]]
    measured = [cell for cell in cells if cell.strip()[:1].isdigit()]
    assert len(measured) == len(kept())


def test_every_loss_type_of_the_peers_is_there():
    """A peer's table cannot lose a row: TRL and Liger have these eight, verl's policy losses those six."""
    eight = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"}
    six = {"vanilla", "gspo", "sapo", "gpg", "cispo", "geo_mean"}
    for peer, names in (("TRL", eight), ("Liger", eight), ("verl", six)):
        rows = {what.split("`")[1] for name, what, _ in kept() if name.startswith(peer) and "," not in name}
        assert rows == names, peer
    assert max(kept().values()) < 3e-5
    assert max(value for (peer, *_), value in kept().items() if not peer.startswith("Liger")) <= 2e-6


def test_a_case_that_is_not_kept_fails_until_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", tmp_path / "parity.json")
    module.KEPT.write_text("[]")
    with pytest.raises(AssertionError, match="run `make parity`"):
        Parity(keep=False)("TRL 1.0", "`grpo`", "beta 0", 0.0, 1e-6)
    with pytest.raises(AssertionError, match=r"1\.0e-03 exceeds 1e-06"):
        Parity(keep=True)("TRL 1.0", "`grpo`", "beta 0", 1e-3, 1e-6)
    for version, difference in (("1.0", 3e-7), ("1.1", 2e-7)):
        found = Parity(keep=True)
        for value in (difference, 1e-9):
            found(f"TRL {version}", "`grpo`", "beta 0", value, 1e-6)
        found.write()
    assert module.kept() == {("TRL 1.1", "`grpo`", "beta 0"): 2e-7}
    Parity(keep=False)("TRL 1.2", "`grpo`", "beta 0", 0.0, 1e-6)
    assert tables(module.kept()) == "| TRL 1.1 | beta 0 |\n| --- | --- |\n| `grpo` | 2e-07 |"
