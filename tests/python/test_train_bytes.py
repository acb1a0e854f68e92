"""The training example: packing, learning, repeatable bits, and the three losses it compares."""

import importlib
import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

sys.path.append(str(Path(__file__).parents[2] / "examples"))
gpt, packs, train_bytes = (importlib.import_module(name) for name in ("gpt", "packs", "train_bytes"))

TEXT = "a key sees no later query , the row adds up to one and each document is alone in its pack ."


def documents(lengths: list[int], seed: int = 0) -> list[bytes]:
    """Text of those many bytes."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(TEXT.split(), k=length + 1)).encode()[:length] for length in lengths]


def pieces_of(pack) -> list[tuple]:
    """(tokens, targets, places) of each piece, as lists."""
    tensors = (pack.tokens, pack.targets, pack.places)
    spans = itertools.pairwise(pack.cu_seqlens.tolist())
    return [tuple(tensor[start:stop].tolist() for tensor in tensors) for start, stop in spans]


# ---- Packing ----


@pytest.mark.parametrize(("context", "tokens"), [(64, 64), (64, 100), (100, 64), (1, 7), (1000, 33), (7, 1000)])
def test_every_position_is_packed_once(context, tokens):
    texts = [random.Random(n).randbytes(n) for n in (1, 2, 6, 7, 62, 63, 64, 65, 128, 300)]
    made = list(packs.fill(packs.cut(texts, context), tokens))
    assert all(len(pack.tokens) == tokens for pack in made[:-1])
    assert 0 < len(made[-1].tokens) <= tokens
    # In order, what is read is each document after a boundary, what is predicted is each before one.
    end = packs.BOUNDARY
    read = [symbol for text in texts for symbol in (end, *text)]
    predicted = [symbol for text in texts for symbol in (*text, end)]
    assert torch.cat([pack.tokens for pack in made]).tolist() == read
    assert torch.cat([pack.targets for pack in made]).tolist() == predicted


def test_offsets_and_no_piece_crosses_a_document():
    texts = documents([1, 5, 90, 40, 200, 17])
    order = packs.cut(texts, 48)
    random.Random(0).shuffle(order)
    seen = []
    for pack in packs.fill(order, 64):
        ends = pack.cu_seqlens.tolist()
        assert pack.cu_seqlens.dtype == torch.int32
        assert ends[0] == 0
        assert ends[-1] == len(pack.tokens)
        assert all(start < stop <= start + 48 for start, stop in itertools.pairwise(ends))
        for tokens, targets, places in pieces_of(pack):
            assert places == list(range(len(tokens)))
            assert tokens[1:] == targets[:-1]  # Of one document: what comes next is read next.
            assert packs.BOUNDARY not in tokens[1:]
            assert packs.BOUNDARY not in targets[:-1]
            seen += zip(tokens, targets, strict=True)
    pairs = [pair for text in texts for pair in itertools.pairwise([packs.BOUNDARY, *text, packs.BOUNDARY])]
    assert sorted(seen) == sorted(pairs)


def test_the_stream_is_endless_and_seeded():
    order = packs.cut(documents([30, 60, 90]), 16)

    def take(seed):
        return [tuple(piece) for piece in itertools.islice(packs.endless(order, seed), 3 * len(order))]

    assert take(1) == take(1) != take(2)
    epochs = [take(1)[i * len(order) : (i + 1) * len(order)] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(tuple(piece) for piece in order)] * 3
    assert epochs[0] != epochs[1]


def test_documents_are_files_each_content_once(tmp_path):
    for n in range(64):
        (tmp_path / f"{n}.txt").write_text(f"file {n}")
    (tmp_path / "again.txt").write_text("file 3")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    training, validation = packs.read_documents([tmp_path])
    assert sorted(training + validation) == sorted(f"file {n}".encode() for n in range(64))
    assert 0 < len(validation) < len(training)
    # Other files move nothing from one side to the other.
    fewer = packs.read_documents([tmp_path / f"{n}.txt" for n in range(32)] + [tmp_path / "63.txt"])
    assert set(fewer[0]) <= set(training)
    assert set(fewer[1]) <= set(validation)


# ---- Losses ----


def tiny_model(seed: int = 0):
    torch.manual_seed(seed)
    model = gpt.Model(gpt.Shape(layers=2, width=32, heads=4, kv_heads=2))
    with torch.no_grad():  # Weights of a trained model's size, so that attention is not flat.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def rounding_of_bf16(model, pack, position: int) -> float:
    """How far bf16 attention may move the loss of one position, to first order.

    It rounds q, k, v and the weights p to bf16, which moves each by a factor of at most 1 + u, u = 2^-9: the loss moves
    by at most u sum |x dL/dx| over all of them.
    """
    rounded = []

    def attend(q, k, v, cu_seqlens):
        document = torch.bucketize(torch.arange(len(q)), cu_seqlens, right=True)
        visible = (document[:, None] == document) & torch.ones(len(q), len(q)).tril().bool()
        groups = q.shape[1] // k.shape[1]
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * q.shape[-1] ** -0.5
        p = logits.masked_fill(~visible, -math.inf).softmax(-1)
        rounded.extend((q, k, v, p))
        return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(groups, 1))

    loss = model.losses(pack, attend)[position]
    gradients = torch.autograd.grad(loss, rounded)
    return 2.0**-9 * sum((x * g).abs().sum().item() for x, g in zip(rounded, gradients, strict=True))


def assert_close(given, wanted, tolerances):
    excess = (given - wanted).abs() - tolerances
    worst = int(excess.argmax())
    message = f"position {worst}: {given[worst]} given, {wanted[worst]} +- {tolerances[worst]} wanted"
    assert excess[worst] <= 0, message


def test_bf16_loss_is_close_to_exact_attention():
    model = tiny_model()
    (pack,) = packs.fill(packs.cut(documents([1, 40, 33, 64, 20]), 64), 200)
    with torch.no_grad():
        own, exact = (model.losses(pack, gpt.attention_of(recipe)) for recipe in ("bf16", "sdpa"))
    # A half more for what is beyond first order.
    tolerances = torch.tensor([1.5 * rounding_of_bf16(model, pack, i) for i in range(len(pack.tokens))])
    assert_close(own, exact, tolerances)
    assert (own != exact).any()  # Two kernels, not one under two names.
    assert train_bytes.validation_loss(model, [pack], gpt.exact) == pytest.approx(
        exact.double().mean().item(), abs=1e-6
    )


@pytest.mark.parametrize("recipe", ["sdpa", "bf16", "mxfp8", "nvfp4", "fp4", "mxfp4-diagonal"])
def test_a_causal_recipe_has_one_loss(recipe):
    model = tiny_model()
    held = list(packs.fill(packs.cut(documents([1, 70, 33, 90, 64]), 64), 150))
    places, together, alone = train_bytes.token_by_token(model, held, gpt.attention_of(recipe), 200, 0)
    assert len(places) == len(together) == len(alone) == 200
    # The linear layers round differently in other shapes, by about 2^-24 sqrt(width) of logits of up to 16. That may
    # carry a value over the edge between two codes: so rarely that hardly a position in a hundred moves.
    moved = ((together - alone).abs() > 2.0**-24 * 16 * 32).sum().item()
    assert moved <= 4, f"{moved} of 200 positions moved, by up to {(together - alone).abs().max()}"


@pytest.mark.parametrize("recipe", ["mxfp4-leaky", "fp8-tensor"])
def test_a_leaky_recipe_has_two(recipe):
    model = tiny_model()
    held = list(packs.fill(packs.cut(documents([1, 70, 33, 90, 64]), 64), 150))
    places, together, alone = train_bytes.token_by_token(model, held, gpt.attention_of(recipe), 200, 0)
    assert len(places) == len(together) == len(alone) == 200
    moved = ((together - alone).abs() > 2.0**-24 * 16 * 32).sum().item()
    assert moved >= 100, f"{moved} of 200 positions moved"


def test_documents_of_a_pack_do_not_see_each_other():
    model = tiny_model()
    texts = documents([40, 50, 36])
    (together,) = packs.fill(packs.cut(texts, 64), 200)
    attend = gpt.attention_of("mxfp8")
    with torch.no_grad():
        losses = model.losses(together, attend)
        changed = model.losses(next(packs.fill(packs.cut([texts[0], b"#" * 50, texts[2]], 64), 200)), attend)
    same = torch.tensor([True] * 41 + [False] * 51 + [True] * 37)
    assert torch.equal(losses[same], changed[same])
    assert (losses[~same] != changed[~same]).any()


# ---- The whole program ----

TINY = "--steps 30 --warmup 3 --tokens 256 --context 64 --layers 1 --width 32 --heads 2 --kv-heads 1 --lr 0.01"
TINY += " --evaluate-every 10 --validation-packs 2 --positions 40 --threads 1"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    for n, text in enumerate(documents([200] * 64)):
        (directory / f"{n}.txt").write_bytes(text)
    return directory


@pytest.fixture
def settings_of_torch():
    """The program sets torch's threads and determinism; other tests get theirs back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def run(corpus: Path, out: Path, *more: str) -> int:
    return train_bytes.main([*TINY.split(), "--data", str(corpus), "--out", str(out), *more])


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("mxfp8", "float32"), ("mxfp8", "bfloat16"), ("mxfp4-diagonal", "float32")],  # The last rounds stochastically.
)
def test_it_learns_and_repeats_its_bits(recipe, dtype, corpus, tmp_path, capsys):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert run(corpus, tmp_path / name, "--recipe", recipe, "--dtype", dtype, "--seed", seed) == 0
    printed = capsys.readouterr()
    assert "%|" not in printed.err  # No progress bar in a pipe.
    logs = {name: (tmp_path / name / "log.csv").read_text() for name in "abc"}
    assert logs["a"] == logs["b"] != logs["c"]
    models = [torch.load(tmp_path / name / "model.pt") for name in "ab"]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])

    rows = [line.split(",") for line in logs["a"].splitlines()]
    assert rows[0] == ["step", "positions", "lr", "loss", "gradient_norm", "validation_own", "validation_exact"]
    assert [int(row[0]) for row in rows[1:]] == list(range(1, 31))
    assert [int(row[0]) for row in rows[1:] if row[5]] == [10, 20, 30]
    first, last = float(rows[1][3]), float(rows[-1][5])
    assert abs(first - math.log(packs.SYMBOLS)) < 0.1  # Weights of 0.02 say next to nothing.
    assert last < 2.9  # The 20 letters and signs of the text alone come to log(20) = 3.0.
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["validation_own"] == last
    assert result["recipe"] == recipe
    assert abs(result["alone"] - result["together"] - result["leak"]) < 1e-9
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("settings_of_torch")
def test_plot_of_several_runs(corpus, tmp_path, capsys):
    names = ["sdpa", "bf16"]
    for name in names:
        assert run(corpus, tmp_path / name, "--recipe", name) == 0
    capsys.readouterr()
    picture = tmp_path / "both.svg"
    assert train_bytes.main(["plot", str(picture), *(str(tmp_path / name) for name in names)]) == 0
    assert "<svg" in picture.read_text()
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["`sdpa`", "`bf16`"]
    assert [line.split("|")[-2].strip() for line in table[2:]] == ["0.0%", "0.0%"]


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--recipe nonsense", "nonsense"),
        ("--recipe mxattention", "mxattention"),
        ("--recipe no/such.json", "no/such.json"),
        ("--data no/such/place", "--data: no/such/place given"),
        ("--width 100", "--width: 100 given"),
        ("--kv-heads 3", "--kv-heads: 3 given"),
        ("--steps 0", "--steps: 0 given"),
        ("--warmup -1", "--warmup: -1 given"),
        ("--positions 1", "--positions: 1 given"),
        ("--lr nan", "--lr: nan given"),
        ("--device nonsense", "--device: nonsense given"),
        ("--dtype float16", "--dtype"),
        ("--nonsense", "--nonsense"),
        ("plot", "plot"),
        ("plot a.png no/such/run", "no/such/run"),
    ],
)
def test_refusals_are_one_line(arguments, named, capsys):
    try:
        code = train_bytes.main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.count("\n") == 1, error
    assert named in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_a_device_is_one_line(capsys):
    assert train_bytes.main(["--device", "cuda"]) == 3
    error = capsys.readouterr().err
    assert "--device: cuda given" in error
    assert error.count("\n") == 1
