"""doctor: what this machine is, what is installed, which known problems it has."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.text import Text

import bakeoff
from bakeoff import hardware
from bakeoff.apps.cli import tables
from bakeoff.apps.cli.terminal import console, declared, print_json
from bakeoff.apps.tabular import named_values
from bakeoff.device import named_device
from bakeoff.errors import TableError
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import cache_dir, read
from bakeoff.select.declare.compiled import unlinkable
from bakeoff.select.declare.installed import missing, package_version

__all__ = ["Machine", "Report", "TableState", "examine", "inspect_machine", "problems", "run", "show"]

LEAST_SHARED = 96 * 1024  # bytes of shared memory that the larger tiles of most kernels need


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the warnings depend on."""

    device: str
    torch: str
    triton: str
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on the CPU."""
    shared_memory: int = 0
    """Bytes of shared memory one program may use."""
    hip: bool = False
    gpu_unused: bool = False
    """There is an NVIDIA GPU that this PyTorch can't use."""
    c_compiler: str | None = None
    cxx_compiler: str | None = None
    unlinkable: str | None = None
    """Why the C++ that torch.compile generates can't be linked; None if it can."""
    python_headers: bool = True
    others: str = ""
    """Which other processes use the device; empty if none."""
    cache_writable: bool = True


class TableState(msgspec.Struct, frozen=True):
    """This machine's table: the number of its rows, of those measured under other versions (stale), of those
    whose candidates have changed since (outdated), and what is wrong with the file itself."""

    path: str
    rows: int = 0
    stale: int = 0
    outdated: int = 0
    problem: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``bakeoff doctor``."""

    bakeoff: str
    device: str
    facts: hardware.Facts
    machine: Machine
    ceilings: hardware.Ceilings
    packages: dict[str, str]
    """Version by package; empty where it is not installed."""
    policy: str
    cache: str
    table: TableState
    warnings: list[str]


def run(device: str, as_json: bool) -> None:
    """Examine and print."""
    report = examine(str(named_device(device)))
    if as_json:
        print_json(report)
    else:
        show(report, console())


def examine(device: str) -> Report:
    """Examine the machine; measuring the device's limits takes a second or two."""
    machine = inspect_machine(device)
    table = _table(device)
    notes = problems(machine)
    broken = missing("triton")
    if broken and machine.triton != "none":
        notes.append(f"{broken}: everything runs on plain PyTorch; install triton anew")
    if table.problem:
        notes.append(f"{table.problem}: it will be set aside and its contests held again")
    if table.stale:
        notes.append(
            f"{table.stale} verdicts were measured under other versions: bakeoff tune RECIPE measures them "
            f"again"
        )
    return Report(
        bakeoff=bakeoff.__version__,
        device=device,
        facts=hardware.facts(device),
        machine=machine,
        ceilings=hardware.ceilings(device),
        packages=_packages(),
        policy=policy.current().policy,
        cache=str(cache_dir()),
        table=table,
        warnings=notes,
    )


def inspect_machine(device: str) -> Machine:
    """The facts that warnings depend on."""
    facts = hardware.facts(device)
    capability, shared = None, 0
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return Machine(
        device=device,
        torch=facts.torch,
        triton=facts.triton,
        capability=capability,
        shared_memory=shared,
        hip=torch.version.hip is not None,
        gpu_unused=not torch.cuda.is_available() and Path("/dev/nvidia0").exists(),
        c_compiler=_first(os.environ.get("CC"), "gcc", "clang", "cc"),
        cxx_compiler=_first(os.environ.get("CXX"), "g++", "clang++"),
        unlinkable=unlinkable(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        others=hardware.disturbance(device) if capability else "",
        cache_writable=_writable(cache_dir()),
    )


def problems(machine: Machine) -> list[str]:
    """Known problems of such a machine, each with its consequence or what to do about it."""
    notes = []
    if _version(machine.torch) < (2, 11):
        notes.append(
            f"torch {machine.torch} is older than 2.11, the oldest that bakeoff is tested with: upgrade it"
        )
    if machine.triton == "none":
        notes.append("triton is not installed: everything runs on plain PyTorch; pip install triton (Linux)")
    elif _version(machine.triton) < (3, 6):
        notes.append(
            f"triton {machine.triton} is older than 3.6, the oldest that bakeoff is tested with: upgrade it"
        )
    if machine.gpu_unused:
        notes.append(
            "there is an NVIDIA GPU, but this PyTorch can't use it: install PyTorch's CUDA build, check the "
            "driver"
        )
    notes += (
        _cpu_problems(machine) if machine.capability is None else _gpu_problems(machine, machine.capability)
    )
    if not machine.cache_writable:
        notes.append(
            f"{cache_dir()} can't be written: verdicts last for one run; set BAKEOFF_CACHE to a writable "
            f"folder"
        )
    return notes


def _cpu_problems(machine: Machine) -> list[str]:
    notes = (
        []
        if machine.gpu_unused
        else ["no GPU: contests are between plain PyTorch and torch.compile on the CPU"]
    )
    if machine.cxx_compiler is None:
        notes.append("no C++ compiler: torch.compile can't be a candidate on the CPU; install g++ or set CXX")
    elif machine.unlinkable:
        notes.append(machine.unlinkable)
    elif not machine.python_headers:
        notes.append("Python.h is missing: torch.compile may fail on the CPU; install python3-dev")
    return notes


def _gpu_problems(machine: Machine, capability: tuple[int, int]) -> list[str]:
    name = f"sm_{capability[0]}{capability[1]}"
    notes = []
    if machine.hip:
        return [
            "kernels have never been run on AMD GPUs: they are verified before use, but expect rejections"
        ]
    if capability < (7, 0):
        notes.append(f"{name} is older than Volta (sm_70): Triton doesn't support it; plain PyTorch is used")
    if capability < (8, 0):
        notes.append(
            f"{name} is older than Ampere (sm_80): bfloat16 is emulated and slow; use float16 or "
            f"train.precision=float32"
        )
    if 0 < machine.shared_memory < LEAST_SHARED:
        notes.append(
            f"{name} gives a program {machine.shared_memory // 1024} KiB of shared memory: large tiles "
            f"don't fit, some "
            "candidates will drop out of their contests"
        )
    if machine.c_compiler is None or not machine.python_headers:
        lacking = "C compiler" if machine.c_compiler is None else "Python.h"
        notes.append(f"no {lacking}: Triton can't build its launcher; install gcc and python3-dev")
    if machine.others:
        notes.append(f"{machine.others}: measured times deserve little trust")
    return notes


def show(report: Report, out: Console) -> None:
    """Print a report for people."""
    facts, limits, table, machine = report.facts, report.ceilings, report.table, report.machine
    units = "cores" if machine.capability is None else "SMs"
    device = f"{facts.device} ({report.device}), {facts.sms} {units}, {facts.memory / 2**30:.0f} GiB"
    if machine.capability:
        device += f", compute capability {machine.capability[0]}.{machine.capability[1]}"
    versions = {
        "bakeoff": report.bakeoff,
        "Python": facts.python,
        "torch": facts.torch,
        "triton": facts.triton,
    }
    versions |= {"CUDA": facts.cuda, "driver": facts.driver or "none"} if machine.capability else {}
    matmul = f"{limits.matmul_dtype} matmul {limits.matmul_tflops:.2f} TFLOP/s"
    rows = {
        "device": device,
        "limits": f"copy {limits.copy_gbps:,.0f} GB/s, {matmul} (measured)",
        "versions": _listed(versions),
        "packages": _listed(report.packages),
        "compilers": _listed({"C": machine.c_compiler, "C++": machine.cxx_compiler}),
        "policy": report.policy,
    }
    places = {
        "cache": report.cache,
        "table": f"{table.rows} verdicts, {table.stale} stale, {table.outdated} not in force: {table.path}",
    }
    out.print(named_values((name, Text(text)) for name, text in rows.items()))
    width = max(map(len, rows)) + 2
    for name, text in places.items():
        out.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=True)
    for warning in report.warnings:
        out.print(Text(f"! {warning}", style="yellow"), soft_wrap=True)


def _listed(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value or 'absent'}" for name, value in values.items())


def _table(device: str) -> TableState:
    path = policy.store.path(device)
    if not os.path.lexists(path):
        return TableState(str(path))
    try:
        table = read(path)
    except TableError as error:
        return TableState(str(path), problem=str(error))
    standings = [tables.standing(table, row, device) for row in table.rows.values()]
    stale = sum(text.startswith("stale") for text in standings)
    return TableState(str(path), len(standings), stale, sum(text.startswith("ignored") for text in standings))


def _packages() -> dict[str, str]:
    required = {package for op in declared().values() for c in op.candidates for package in c.requires}
    optional = ("tensorboard", "wandb")
    return {
        name: package_version(name) if importlib.util.find_spec(name) else ""
        for name in (*sorted(required - {"triton"}), *optional)
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _first(*programs: str | None) -> str | None:
    return next((path for name in programs if name and (path := shutil.which(name))), None)


def _writable(folder: Path) -> bool:
    """Whether files can be created in `folder`, or the folder itself can be."""
    while not os.access(folder, os.F_OK) and folder != folder.parent:  # exists() raises if it can't enter
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
