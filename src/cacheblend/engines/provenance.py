"""Provenance of measured figures: machine, versions, commit, source. Every result file contains it."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("cacheblend", "torch", "transformers", "safetensors", "tokenizers")


def stamp() -> dict[str, Any]:
    """What every figure of a benchmark is written with: machine, versions of the packages, commit of the source."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Processor, the instructions it offers, cores, memory in GiB, accelerator, threads. `device`: that was used; None:
    the CUDA device in use, if there is one."""
    has_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return {
        "processor": _processor(),
        "instructions": instructions(),
        "cores": torch.multiprocessing.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name(device) if has_gpu else None,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_line(device: torch.device | None = None) -> str:
    """Processor, accelerator and threads in one line: what measured times depend on."""
    found = machine(device)
    parts = [found["processor"], found["accelerator"], f"{found['threads']} thread" + "s" * (found["threads"] != 1)]
    return ", ".join(part for part in parts if part)


@cache
def code_digest(parts: Sequence[str], package: Path | None = None) -> str:
    """Hash of a package's files (of a folder, all Python files), for an installed package as well as a checkout."""
    package = package or Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for part in parts:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The checkout's commit, followed by ``+`` if files are changed; None outside a checkout. ``CACHEBLEND_COMMIT``
    names it where the files are a copy of a checkout's."""
    if named := os.environ.get("CACHEBLEND_COMMIT"):
        return named
    here = Path(__file__).resolve().parent
    try:  # an installed package may lie in somebody's own repository, which does not hold it
        if subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True).returncode:
            return None
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return f"{named.get('model name', platform.processor())} family {named.get('cpu family', '?')}"


BF16, AMX = "BF16", "AMX"
_QUESTIONS = {BF16: "_is_avx512_bf16_supported", AMX: "_is_amx_tile_supported"}


def extensions() -> set[str]:
    """Those of `BF16` (AVX-512 products of bf16) and `AMX` (tiles) that this CPU has."""
    return {name for name, question in _QUESTIONS.items() if getattr(torch.cpu, question, lambda: False)()}


def instructions() -> str:
    """``"AVX2"``, ``"AVX512 BF16"``, ``"AVX512 BF16 AMX"``, ..., for people."""
    offered = extensions()
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name in _QUESTIONS if name in offered)])
