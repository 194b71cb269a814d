"""A shipped recipe, as the command runs it: real weights, real questions."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_gsm8k_smoke_trains_on_real_questions(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "amir", "train", "gsm8k-smoke"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "gsm8k-smoke"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    for step in (1, 2):
        rows = [json.loads(line) for line in (run / "completions" / f"step-{step:06d}.jsonl").read_text().splitlines()]
        assert len(rows) == 8
        assert len({row["question"] for row in rows}) == 2
        assert all(1 <= row["tokens"] <= 64 for row in rows)
        assert all(row["tokens"] == 64 for row in rows if row["truncated"])
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "next:" in done.stdout
