"""mxflash-audit: the audit of an attention by its name."""

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from mxflash import __version__
from mxflash._audit import audit
from mxflash._files import load

_LENGTHS = (1, 33, 64, 100, 17, 2, 130)
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
_DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 holds, 1 something was found, 2 bad input or usage."""
    options = _parser().parse_args(arguments)
    try:
        fn = _function(options.function)
        call = _input(options)
        progress = _bar if sys.stderr.isatty() else None
        report = audit(
            fn,
            **call,
            backward=False if options.no_backward else None,
            probes=options.probes,
            reach=options.reach,
            seed=options.seed,
            name=options.function,
            progress=progress,
        )
    except Exception as error:  # 1 would say that something was found.
        if _ours(error):
            print(f"mxflash-audit: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2
    if progress:
        print(file=sys.stderr)
    if options.json == "-":
        print(report.to_json())
        return 0 if report.holds else 1
    if options.json:
        try:
            Path(options.json).write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            print(f"mxflash-audit: --json: {error}", file=sys.stderr)
            return 2
    print(report)
    return 0 if report.holds else 1


class _UsageError(Exception):
    pass


def _ours(error: Exception) -> bool:
    """A message of the package, which says it all; what somebody's function raises comes with its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).parents[1] in Path(frames[-1].filename).parents
    return isinstance(error, _UsageError) or (own and isinstance(error, ValueError | RuntimeError))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mxflash-audit",
        description="Audits an attention: does anything reach where it must not? Exit code 0: it holds, 1: something "
        "was found, 2: bad input or usage.",
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="fn(q, k, v, cu_seqlens) -> o or (o, lse)")
    parser.add_argument("file", metavar="FILE.safetensors", nargs="?", help="q, k, v, cu_seqlens and perhaps do")
    parser.add_argument("--probes", type=int, default=64, metavar="N", help="later tokens to change (64)")
    reach = "how many tokens back a later one may be felt (0; 31 where causal by blocks of 32 is all that is claimed)"
    parser.add_argument("--reach", type=int, default=0, metavar="N", help=reach)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of positions and values (0)")
    parser.add_argument("--no-backward", action="store_true", help="leave the gradients out")
    parser.add_argument("--full", action="store_true", help="it is not causal: every query sees its whole document")
    parser.add_argument("--json", metavar="FILE|-", help="the report as JSON, into a file or instead of the table")
    parser.add_argument("--framework", choices=("torch", "numpy"), help="arrays to give (torch where it is installed)")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the input (the file's; float32 without one)")
    parser.add_argument("--version", action="version", version=f"mxflash-audit {__version__}")
    return parser


def _function(given: str) -> Any:
    """The function that MODULE:FUNCTION names; the current directory is looked at first, as with python -m."""
    module_name, colon, path = given.partition(":")
    if not (module_name and colon and path):
        raise _UsageError(f"function: {given!r} given, MODULE:FUNCTION allowed")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # The module is there; what it imports is not.
        raise _UsageError(f"function: {given!r} given, but there is no module {error.name}") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise _UsageError(f"function: {given!r} given, but {module_name} has no {path}")
        found = getattr(found, name)
    if not callable(found):
        raise _UsageError(f"function: {given!r} given, but that is not a function")
    return found


def _input(options: argparse.Namespace) -> dict[str, Any]:
    if options.probes < 1:
        raise _UsageError(f"--probes: {options.probes} given, 1 or more allowed")
    if options.reach < 0:
        raise _UsageError(f"--reach: {options.reach} given, 0 or more allowed")
    if options.seed < 0:
        raise _UsageError(f"--seed: {options.seed} given, 0 or more allowed")
    framework = options.framework or ("torch" if _has_torch() else "numpy")
    if framework == "torch" and not _has_torch():
        raise _UsageError("--framework: torch given, but it is not installed")
    tensors, metadata = _generated(options.seed) if options.file is None else _loaded(options.file, framework)
    dtype = options.dtype or ("float32" if options.file is None else None)
    call = {name: _cast(tensor, framework, dtype) for name, tensor in tensors.items()}
    call["causal"] = not options.full and metadata.get("causal", "true") != "false"
    if "softmax_scale" in metadata:
        try:
            call["scale"] = float(metadata["softmax_scale"])
        except ValueError:
            raise _UsageError(f"softmax_scale: {metadata['softmax_scale']!r} given, a number allowed") from None
    return call


def _has_torch() -> bool:
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


def _generated(seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    import numpy as np

    random = np.random.default_rng(seed)
    offsets = np.cumsum([0, *_LENGTHS], dtype=np.int32)
    shapes = {"q": _HEADS, "k": _KV_HEADS, "v": _KV_HEADS, "do": _HEADS}
    tensors = {
        name: random.standard_normal((int(offsets[-1]), heads, _HEAD_DIM), np.float32) for name, heads in shapes.items()
    }
    return tensors | {"cu_seqlens": offsets}, {}


def _loaded(path: str, framework: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        tensors, metadata = load(path, framework)
    except (OSError, RuntimeError, ValueError) as error:
        raise _UsageError(str(error)) from None
    for name in ("q", "k", "v"):
        if name not in tensors:
            raise _UsageError(f"{path}: no tensor {name}; q, k, v and perhaps do and cu_seqlens allowed")
    if "cu_seqlens_q" in tensors:
        tensors["cu_seqlens"] = tensors["cu_seqlens_q"]
    return {
        name: tensors[name] for name in ("q", "k", "v", "do", "cu_seqlens", "cu_seqlens_k") if name in tensors
    }, metadata


def _cast(tensor: Any, framework: str, dtype: str | None) -> Any:
    floating = "float" in str(tensor.dtype)
    if framework == "torch":
        import torch

        tensor = torch.as_tensor(tensor)
        return tensor.to(getattr(torch, dtype)) if dtype and floating else tensor
    if not dtype or not floating:
        return tensor
    if dtype == "bfloat16":
        import ml_dtypes

        return tensor.astype(ml_dtypes.bfloat16)
    return tensor.astype(dtype)


def _bar(done: float) -> None:
    filled = round(40 * done)
    print(f"\r[{'=' * filled}{' ' * (40 - filled)}] {100 * done:3.0f} %", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
