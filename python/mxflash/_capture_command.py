"""mxflash-capture: q, k, v and dO of a language model in local files, on text of one's own."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

_DTYPES = ("bfloat16", "float16", "float32")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0: files written, 2: bad input, said in one line."""
    options = _parser().parse_args(arguments)
    try:
        _capture(options)
    except (ImportError, KeyError, OSError, RuntimeError, UnicodeError, ValueError) as error:
        print("mxflash-capture:", " ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 2
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog="mxflash-capture",
        description="Runs a language model of local files forward and backward on packed documents, and writes what "
        "its attention got, a safetensors file a layer, for `mxflash run` and `mxflash audit`. Never downloads.",
    )
    parser.add_argument("model", metavar="MODEL_FOLDER", help="a folder that transformers can load")
    parser.add_argument("--gguf", metavar="FILE", help="a GGUF file in that folder, loaded instead of safetensors")
    parser.add_argument(
        "--text", metavar="FILE", nargs="+", help="UTF-8 files, each a document; default: the sources of this package"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of all documents together, at most (1024)")
    parser.add_argument("--layers", metavar="I,J", help="default: all")
    parser.add_argument("--heads", metavar="I,J", help="query heads, as many of each key/value head; default: all")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="to run the model in (bfloat16)")
    parser.add_argument("--out", default="layer{layer}.safetensors", help="path, {layer} in it replaced")
    return parser


def _capture(options: argparse.Namespace) -> None:
    layers, heads = _numbers("--layers", options.layers), _numbers("--heads", options.heads)
    if options.tokens < 1:
        raise ValueError(f"--tokens: {options.tokens} given, 1 or more allowed")
    if not Path(options.model).is_dir():
        raise ValueError(f"MODEL_FOLDER: {options.model!r} given, an existing folder allowed")
    if options.gguf is not None and not (Path(options.model) / options.gguf).is_file():
        raise ValueError(f"--gguf: {options.gguf!r} given, a file in {options.model!r} allowed")
    texts = [Path(name).read_text(encoding="utf-8") for name in options.text or sorted(_sources())]

    os.environ["HF_HUB_OFFLINE"] = "1"  # Read once, when the library is imported.
    import torch
    import transformers

    import mxflash.capture

    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    where = {"local_files_only": True} | ({"gguf_file": options.gguf} if options.gguf else {})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa", **where
        ).eval()
    except Exception as error:  # Libraries below raise that very class for broken files.
        raise ValueError(f"MODEL_FOLDER: {options.model!r} given, which transformers cannot load: {error}") from error
    documents = _pack([tokenizer(text)["input_ids"] for text in texts], options.tokens)
    longest, limit = max(map(len, documents)), getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(f"--tokens: a document of {longest} tokens given, {limit} allowed by this model")
    with mxflash.capture.record(model, layers, heads) as recording:
        _step(model, documents)
    for path in recording.save(options.out):
        print(path)
    for layer in recording.layers:
        metadata = recording.metadata(layer)
        if "window" in metadata:
            print(f"layer {layer} has a window: mxflash run ... --window {metadata['window']}")


def _step(model, documents: list[list[int]]) -> None:
    """Forward and backward of the loss: each token from those before it in its document."""
    import torch

    # A gradient to the first layer is all that is needed: the other weights' own take memory.
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    ids = torch.tensor([[token for document in documents for token in document]])
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    labels = ids.masked_fill(positions == 0, -100)
    if bool((labels == -100).all()):
        raise ValueError("--text: documents of one token given, one of two or more allowed")
    model(ids, position_ids=positions, labels=labels, use_cache=False).loss.backward()


def _pack(documents: list[list[int]], tokens: int) -> list[list[int]]:
    """The beginnings of the documents, in equal shares: what short ones leave goes to the others."""
    lengths = [0] * len(documents)
    shortest_first = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    for done, index in enumerate(shortest_first):
        lengths[index] = min(len(documents[index]), tokens // (len(documents) - done))
        tokens -= lengths[index]
    packed = [document[:length] for document, length in zip(documents, lengths, strict=True) if length]
    if not packed:
        raise ValueError("--text: no tokens given, one or more allowed")
    return packed


def _sources() -> list[Path]:
    return list(Path(__file__).parent.glob("*.py"))


def _numbers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise ValueError(f"{name}: {text!r} given, integers with commas allowed") from None
