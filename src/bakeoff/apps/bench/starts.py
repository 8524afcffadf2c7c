"""The time that the small LLM-Med takes to tune from nothing, and to start when its table is there.

Each is measured in a new process, with a table and caches of Triton and Inductor that nothing else uses.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from bakeoff.device import synchronize
from bakeoff.errors import ContestError
from bakeoff.models.llm_med import Config, LLMMed
from bakeoff.select import tune, using
from bakeoff.timing import seconds_per_call

__all__ = ["measured"]

_LIMIT_S = 900


def measured(device: str) -> dict[str, Any]:
    """A row of times, each less that of a plain step: `bakeoff.tune` with empty caches (`tune_s`) and
    with full ones (`cached_start_s`), and loading the winners' compiled code in a new process (`load_s`).

    Raises:
        ContestError: the measuring process failed; the message holds its last line.
    """
    with tempfile.TemporaryDirectory(prefix="bakeoff-start-") as folder:
        cold, cached = _once(device, folder), _once(device, folder)
    return {
        **{name: cold[name] for name in ("model", "mode", "batch", "seq", "params", "keys", "unsettled")},
        "measured": [cold["measured"], cached["measured"]],
        "step_us": 1e6 * cached["step_s"],
        "tune_s": cold["tune_s"] - cold["step_s"],
        "cached_start_s": cached["tune_s"] - cached["step_s"],
        "load_s": cached["first_s"] - cached["step_s"],
    }


def _once(device: str, folder: str) -> dict[str, Any]:
    names = ("BAKEOFF_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    caches = {name: f"{folder}/{name.lower()}" for name in names}
    environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("BAKEOFF_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-m", "bakeoff.apps.bench.starts", device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ContestError(f"tuning LLM-Med small on {device} failed: {last}")
    seconds: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(device: str) -> None:
    """Tune once and print what it took as JSON."""
    cuda = device.startswith("cuda")
    batch, length = (48, 512) if cuda else (2, 128)
    model = LLMMed(Config.sizes("small")).to(device)
    ids = torch.randint(0, 256, (batch, length + 1), device=device)

    def step() -> None:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=cuda):
            _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        model.zero_grad(set_to_none=True)
        synchronize(device)  # so that tuning, which runs this step, counts all of it

    with using("off"):
        step()  # the device's own start is not tuning
    first_s = seconds_per_call([step], 1, device)
    report = tune(step, 120.0)
    step()
    print(
        json.dumps(
            {
                "model": "LLMMed small",
                "mode": "tune, then start with the table",
                "batch": batch,
                "seq": length,
                "params": sum(p.numel() for p in model.parameters()),
                "keys": len(report.verdicts),
                "measured": report.measured,
                "unsettled": report.unsettled,
                "tune_s": report.seconds,
                "first_s": first_s,
                "step_s": seconds_per_call([step], 1, device),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
