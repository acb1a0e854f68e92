#!/usr/bin/env python3
"""The machine code of a program's kernels, a line each: registers, stack and local bytes, and how many instructions it
has that matter. Fails where a kernel keeps something in local memory, one on E4M3 codes does not multiply in FP8, or
one that is embedded in BF16 does not in the tensor cores.

    check_sass.py build/gpu/tools/mxflash/mxflash
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = ("QGMMA", "HGMMA", "HMMA", "LDL", "STL")
ON_CODES = ("::forward_kernel", "::backward_kernel")
EMBEDDED = ("embed_forward_kernel", "embed_rows_kernel", "embed_queries_kernel", "embed_keys_kernel")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass
class Kernel:
    usage: dict[str, int] = field(default_factory=dict)
    opcodes: Counter = field(default_factory=Counter)


def tools() -> str:
    """PATH with the pinned tools of .venv in front; cuobjdump itself looks for nvdisasm there."""
    folders = [str(folder) for folder in ROOT.glob(".venv/lib/python3.*/site-packages/nvidia/cu13/bin")]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    for tool in ("cuobjdump", "nvdisasm"):
        if shutil.which(tool, path=path) is None:
            sys.exit(f"check_sass: no {tool}: run scripts/setup.sh gpu")
    return path


def output_of(path: str, *command: str, text: str | None = None) -> str:
    environment = {**os.environ, "PATH": path}
    executable = shutil.which(command[0], path=path)
    if executable is None:
        sys.exit(f"check_sass: no {command[0]} on PATH")
    result = subprocess.run([executable, *command[1:]], input=text, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        sys.exit(f"check_sass: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def read_kernels(program: str, path: str) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    name = ""
    for line in output_of(path, "cuobjdump", "--dump-resource-usage", program).splitlines():
        if match := re.match(r"^\s*Function (\S+):$", line):
            name = match[1]
        elif name and "REG:" in line:
            kernels[name] = Kernel({key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)})
            name = ""
    kernel = None
    for line in output_of(path, "cuobjdump", "--dump-sass", program).splitlines():
        if match := re.match(r"^\s*Function : (\S+)$", line):
            kernel = kernels.get(match[1])
        elif kernel and (match := INSTRUCTION.match(line)):
            kernel.opcodes[match[1]] += 1
    return kernels


def faults(name: str, kernel: Kernel) -> list[str]:
    found = []
    if not kernel.opcodes:
        found.append("no machine code was read")
    if local := kernel.opcodes["LDL"] + kernel.opcodes["STL"]:
        found.append(f"{local} loads and stores of local memory, 0 allowed")
    for what in ("STACK", "LOCAL"):
        if kernel.usage.get(what, 0):
            found.append(f"{what.lower()} {kernel.usage[what]} bytes, 0 allowed")
    if any(kernel_name in name for kernel_name in ON_CODES) and not kernel.opcodes["QGMMA"]:
        found.append("no QGMMA: it does not multiply in FP8")
    if any(kernel_name in name for kernel_name in EMBEDDED) and not kernel.opcodes["HMMA"]:
        found.append("no HMMA: it does not multiply in the tensor cores")
    return found


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("check_sass: one program allowed, as build/gpu/tools/mxflash/mxflash")
    program = sys.argv[1]
    path = tools()
    kernels = read_kernels(program, path)
    mangled = sorted(kernels)
    names = output_of(path, "c++filt", text="\n".join(mangled)).splitlines()
    failed = []
    print(f"{'registers':>9} {'stack':>5} {'local':>5} " + " ".join(f"{opcode:>5}" for opcode in COUNTED) + "  kernel")
    for key, name in zip(mangled, names, strict=True):
        kernel = kernels[key]
        numbers = [kernel.usage.get("REG", 0), kernel.usage.get("STACK", 0), kernel.usage.get("LOCAL", 0)]
        counts = " ".join(f"{kernel.opcodes[opcode]:>5}" for opcode in COUNTED)
        print(f"{numbers[0]:>9} {numbers[1]:>5} {numbers[2]:>5} {counts}  {name}")
        failed += [f"{name}: {fault}" for fault in faults(name, kernel)]
    for kernel_name in (*ON_CODES, *EMBEDDED):
        if not any(kernel_name in name for name in names):
            failed.append(f"{program}: no kernel named {kernel_name}")
    if failed:
        sys.exit("\n".join(f"check_sass: {fault}" for fault in failed))
    print(f"check_sass: {len(kernels)} kernels, no local memory")


if __name__ == "__main__":
    main()
