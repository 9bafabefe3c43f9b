"""The three models: their sizes, their windows, and that reading in chunks is reading."""

from dataclasses import replace

import pytest
import torch

from landmark.attention.keys import Keys
from landmark.memory import Memory, RecurrentMemory
from landmark.models import Decoder, DecoderConfig
from landmark.models import head_loss as parts
from landmark.models.checkpoint import new_decoder
from landmark.models.config import Landmarks, Recurrence
from landmark.models.language_model import summed_loss
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests.configurations import changed
from tests.pairs import all_pairs, name_of

TINY = DecoderConfig(vocab_size=64, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32)
LANDMARK = replace(TINY, landmarks=Landmarks(60, 5))
CMT = replace(TINY, landmarks=Landmarks(60, 5, cmt=True))
XL = replace(TINY, recurrence=Recurrence(6, 4))
LOOKING_BACK = {"key_offset": 0.5, "rotary_fraction": 0.5, "qk_norm": True, "initialisation": "fan_in"}
HEADS = LOOKING_BACK | {"num_heads": 4, "induction_heads": 1}


def tiny(config, scale=15):
    torch.manual_seed(0)
    model = new_decoder(config).double()
    for parameter in model.parameters():  # the initialisation is too small to tell paths apart
        if parameter.ndim == 2:
            parameter.data *= scale
    return model


OF_KIND = {"landmark_id": 50260, "block_size": 50, "window": 256, "cache": 256}


@pytest.mark.parametrize("kind", ["transformer", "landmark", "transformer_xl"])
def test_paper_size(kind):
    shape = {"vocab_size": 50304, "num_layers": 12, "num_heads": 8, "head_dim": 128, "mlp_dim": 4096}
    config = DecoderConfig.from_flat({"kind": kind, **shape, **OF_KIND})
    with torch.device("meta"):
        model = Decoder(config)
    assert model.num_parameters() == 202_531_840
    assert model.num_parameters() - model.input_embeddings().weight.numel() == 151_020_544
    assert sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n) == 150_994_944


@pytest.mark.parametrize("kind", ["gpt2", "fan_in"])
def test_initialisation(kind):
    torch.manual_seed(0)
    shape = {"num_layers": 8, "head_dim": 64, "mlp_dim": 512, "vocab_size": 512}
    for name, parameter in Decoder(changed(TINY, **shape, initialisation=kind)).named_parameters():
        if parameter.ndim == 1:
            assert parameter.eq(1).all()
        else:
            expected = parameter.shape[1] ** -0.5 if kind == "fan_in" and "blocks" in name else 0.02
            expected /= 4 if name.endswith(("out.weight", "mlp_out.weight")) else 1
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


KEYS = all_pairs(
    {
        "key_offset": [0.0, 0.5, 1.0],
        "rotary_fraction": [0.0, 0.5],
        "landmark_key": ["token", "mean"],
        "landmark_bias": [False, True],
        "qk_norm": [False, True],
        "num_kv_heads": [1, 2],
        "alpha": [0.0, 0.3, 1.0],
        "cmt": [False, True],
        "chunks": [(29,), (1, 1, 3, 5, 6, 1, 12), (10, 19)],
    },
    lambda case: not case["cmt"] or len(case["chunks"]) == 1,  # in a window landmarks are free, in a memory controlled
)


def with_landmarks(model, raw):
    """Logits of a text whose landmarks are put in by hand."""
    tokens = torch.cat([part for five in raw.split(5, 1) for part in (five, five.new_full((len(raw), 1), 60))], 1)
    length = raw.shape[1] + raw.shape[1] // 5
    own = [place for place in range(length) if place % 6 < 5]
    return model.head(model.hidden(tokens[:, :length])[:, own])


@pytest.mark.parametrize("case", KEYS, ids=name_of)
def test_a_landmark_model_reads_in_chunks_as_in_one_window(case, tmp_path):
    """Where all blocks are retrieved, chunk by chunk, token by token, and from a saved memory."""
    keys, chunks = {name: case[name] for name in case if name != "chunks"}, list(case["chunks"])
    model, raw = tiny(changed(LANDMARK, **keys)), torch.randint(0, 50, (2, 29))
    expected, memory = model(raw), model.new_memory(k=9)
    torch.testing.assert_close(with_landmarks(model, raw), expected)
    read = torch.cat([model(part, memory=memory) for part in raw.split(chunks, 1)], 1)
    torch.testing.assert_close(read, expected, atol=1e-10, rtol=0)
    for cut in () if keys["cmt"] else (7, 10):  # within a block, and behind a landmark
        memory, loaded = model.new_memory(k=9), model.new_memory(k=9)
        model(raw[:, :cut], memory=memory)
        memory.save(tmp_path / str(cut))
        loaded.load(tmp_path / str(cut))
        torch.testing.assert_close(model(raw[:, cut:], memory=loaded), expected[:, cut:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", [{}, LOOKING_BACK], ids=["paper", "looking back"])
@pytest.mark.parametrize(
    ("config", "memory"),
    [
        (changed(XL, cache=100), lambda model: model.new_memory()),
        (XL, lambda model: model.unlimited_memory(29)),
        (TINY, lambda model: model.unlimited_memory(29)),
        (TINY, lambda model: model.new_memory(window=29, sinks=4)),
    ],
)
def test_models_without_landmarks_read_in_chunks_as_the_plain_one_in_a_window(config, memory, options):
    model, whole, raw = tiny(changed(config, **options)), tiny(changed(TINY, **options)), torch.randint(0, 50, (2, 29))
    read, memory = [], memory(model)
    for part in raw.split([1, 1, 7, 20], 1):
        read.append(model(part, memory=memory))
    torch.testing.assert_close(torch.cat(read, 1), whole(raw), atol=1e-10, rtol=0)
    other = tiny(changed(TINY, key_offset=0.5))
    assert not torch.allclose(tiny(TINY)(raw), other(raw)), "key_offset changes nothing"
    assert not torch.allclose(tiny(changed(TINY, key_offset=0.5, rotary_fraction=0.5))(raw), other(raw))


@torch.no_grad()
def test_a_generated_token_copies_no_earlier_key():
    """Without a window, and on no request, a plain transformer has no memory at all."""
    model = tiny(TINY)
    assert model.new_memory() is None
    memory = model.unlimited_memory(501)
    model(torch.randint(0, 50, (1, 500)), memory=memory)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(torch.randint(0, 50, (1, 1)), memory=memory)
    keys = 500 * TINY.num_heads * TINY.head_dim * 8  # bytes in float64
    assert max(event.self_cpu_memory_usage for event in profile.events()) < keys
    with pytest.raises(ValueError, match="502 tokens or more, and the memory is for 501"):
        model(torch.randint(0, 50, (1, 1)), memory=memory)


@pytest.mark.parametrize("joint", [0.0, 0.5, 1.0])
def test_blocks_of_equal_scores_weigh_as_much_as_their_tokens(joint):
    """With the bias log ℓ and no key of its own, a landmark makes landmark attention full attention."""
    keys = {"rotary_fraction": 0.0, "landmark_key": "mean", "landmark_bias": True, "alpha": joint}
    model, plain = tiny(changed(LANDMARK, **keys)), tiny(changed(TINY, rotary_fraction=0.0))
    weights = {name: x for name, x in model.state_dict().items() if "bias" not in name}
    for layer in range(2):
        weights[f"blocks.{layer}.attention.qkv.weight"][: 2 * 2 * 8] = 0  # no query, no key
    plain.load_state_dict(weights)
    raw = torch.randint(0, 50, (2, 23))
    # The last block is the local one: its tokens and the earlier blocks weigh the same.
    torch.testing.assert_close(model(raw)[:, :20], plain(raw)[:, :20])


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_induction_heads_find_what_follows_an_earlier_occurrence(kv_heads):
    """Before any training; only the keys of these heads, in the channels of the token before, differ from a start."""
    shape = {"num_layers": 3, "num_heads": 4, "head_dim": 64, "vocab_size": 512, "num_kv_heads": kv_heads}
    config = changed(TINY, **shape, **LOOKING_BACK)
    plain, model = (tiny(changed(config, induction_heads=count), scale=1).float() for count in (0, 1))
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, plain.get_parameter(name))
        assert same == (name not in ("blocks.1.attention.qkv.weight", "blocks.2.attention.qkv.weight")), name
    attention, heads = model.blocks[1].attention, kv_heads or 4
    new = (attention.qkv.weight != plain.blocks[1].attention.qkv.weight).any(1).nonzero().squeeze(1)
    last = (4 + heads) * 64  # the end of the keys
    assert new.tolist() == list(range(last - 32, last))
    tokens = torch.randperm(512)[:40].repeat(2)[None]
    q, k, _ = model.blocks[1].before_attention(model.embedding(tokens), None)
    k = Keys(0.5).shifted(k).repeat_interleave(4 // heads, 1)
    scores = (q[..., 32:] @ k[..., 32:].mT)[0, -1]
    for query in range(41, 80):  # the first token has the key of no other
        assert int(scores[query, : query + 1].argmax()) == query - 39, query


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("config", "few", "counts"),
    [
        *((config, few, counts) for config in (TINY, LANDMARK) for few, counts in ((False, [38]), (True, [3]))),
        (XL, False, [12, 17, 9]),
        (XL, True, [2, 1, 0]),
    ],
)
def test_losses_are_those_of_windows_and_count_only_targets(config, few, counts, is_large, weighted, monkeypatch):
    """Losses and gradients are those of all logits; where few positions have a target the head sees these alone, and
    where logits are many it is called for none."""
    monkeypatch.setattr(parts, "AT_ONCE", 200 if is_large else 1 << 28)
    model, phase, seen = tiny(config), torch.tensor([1, 4, 0]), []
    tokens, targets = torch.randint(0, 50, (2, 3, 15), generator=torch.Generator().manual_seed(3))
    scored = [3, 17, 24] if few else [*range(7, 45)]
    targets = torch.full((45,), NO_LOSS).index_copy(0, torch.tensor(scored), targets.flatten()[scored]).view(3, 15)
    weights = torch.rand(3, 15, dtype=torch.float64) if weighted else None
    if config is XL:
        memory = RecurrentMemory(4)
        logits = torch.cat([model(part, memory=memory) for part in tokens.split(6, 1)], 1)
    else:
        logits = model.head(model.hidden(tokens, phase))
    head = model.head
    monkeypatch.setattr(model, "head", lambda hidden: seen.append(hidden.shape[:2].numel()) or head(hidden))
    losses = list(model.window_losses(WindowBatch(tokens, targets, phase, weights=weights)))
    assert sum(seen) == (3 if few else 0 if is_large else 45)
    assert [int(count) for _, count in losses] == counts
    assert isinstance(losses[0][1], torch.Tensor), "reading it would wait for a GPU"
    every = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    totals = sum(loss for loss, _ in losses), (every if weights is None else every * weights.flatten()).sum()
    torch.testing.assert_close(*totals, rtol=1e-12, atol=0)
    found, expected = (torch.autograd.grad(total, list(model.parameters())) for total in totals)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    if config is LANDMARK:
        assert not torch.allclose(model.hidden(tokens, torch.zeros_like(phase)), model.hidden(tokens, phase))


def test_transformer_xl_gradient_stops_at_the_window():
    model = tiny(XL)
    tokens = torch.randint(0, 50, (1, 12))
    embedded = []
    model.embedding.register_forward_hook(lambda *args: embedded.append(args[2]) or args[2].retain_grad())
    losses = model.window_losses(WindowBatch(tokens, tokens))
    first = next(losses)[0]
    first.backward()
    before = embedded[0].grad.clone()
    next(losses)[0].backward()
    torch.testing.assert_close(embedded[0].grad, before, atol=0, rtol=0)


def test_every_parameter_of_every_model_gets_a_gradient():
    mean = changed(CMT, **LOOKING_BACK, landmark_key="mean", landmark_bias=True)
    looking_back = [mean, *(changed(config, **LOOKING_BACK) for config in (TINY, XL))]
    grouped = [replace(config, num_kv_heads=1) for config in (LANDMARK, CMT)]
    for config in (TINY, LANDMARK, XL, CMT, *grouped, *looking_back):
        model = tiny(config)
        tokens = torch.randint(0, 50, (2, 17))
        controlled = torch.rand(2, 2, 5) < 0.5 if config.cmt else None
        for loss, _ in model.window_losses(WindowBatch(tokens, tokens, torch.tensor([0, 2]), controlled=controlled)):
            loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "landmark", "transformer_xl"])
def test_compiled_parts_compute_the_same_and_layers_share_them(kind):
    """Without a code generator behind them; what is not attention is one graph before it and one after it."""
    options = {"landmark_key": "mean", "landmark_bias": True} if kind == "landmark" else {}
    config = changed({"plain": TINY, "landmark": LANDMARK, "transformer_xl": XL}[kind], **LOOKING_BACK, **options)
    tokens = torch.randint(0, 50, (2, 24))
    model, found = tiny(config), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiled in (False, True):
        if compiled:
            model.compile_parts("aot_eager")
        losses = [loss for loss, _ in model.window_losses(WindowBatch(tokens, tokens, torch.tensor([0, 2])))]
        found.append([*losses, *torch.autograd.grad(sum(losses), list(model.parameters()))])
    torch.testing.assert_close(*found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert list(model.state_dict()) == list(tiny(config).state_dict())


def test_the_token_does_not_depend_on_the_text_and_each_layer_has_its_own_landmarks():
    models = [tiny(replace(CMT, backend=backend)) for backend in ("blockwise", "reference")]
    tokens, phase = torch.randint(0, 50, (2, 17)), torch.tensor([0, 3])
    results = []
    for layers in ((False, False), (True, False), (False, True), (True, True)):
        controlled = torch.tensor(layers)[None, :, None].expand(2, 2, 5)
        ours, reference = (model.hidden(tokens, phase, controlled=controlled) for model in models)
        torch.testing.assert_close(ours, reference)
        results.append(ours)
    assert all(not torch.allclose(results[i], results[j]) for i in range(4) for j in range(i))
    torch.testing.assert_close(models[0].hidden(tokens, phase), results[0])
    assert Decoder(CMT).num_parameters() == Decoder(LANDMARK).num_parameters() + CMT.hidden_dim


def test_positions_are_those_of_the_batch():
    model = tiny(LANDMARK)
    tokens, phase = torch.randint(0, 50, (2, 17)), torch.tensor([0, 3])
    straight = torch.arange(17).expand(2, -1)
    expected = model.hidden(tokens, phase)
    torch.testing.assert_close(model.hidden(tokens, phase, positions=straight), expected)
    torch.testing.assert_close(model.hidden(tokens, phase, positions=straight + 1000), expected)
    jumped = straight.clone()
    jumped[1, 9:] += 40
    found = model.hidden(tokens, phase, positions=jumped)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1, :9], expected[1, :9])
    assert not torch.allclose(found[1, 9:], expected[1, 9:])
    for fraction in (0.0, 0.5):  # only channels that turn have positions
        turning = tiny(changed(LANDMARK, rotary_fraction=fraction, landmark_key="mean", key_offset=0.5))
        found, expected = (turning.hidden(tokens, phase, positions=each) for each in (jumped, straight))
        assert torch.equal(found, expected) == (fraction == 0)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: tiny(LANDMARK).new_memory(cutoff=0.3), "cmt.cutoff=0.3: this model has no context miss token"),
        (lambda: tiny(LANDMARK)(torch.zeros(1, 3, dtype=torch.int64), memory=Memory(7)), "block_size=7, the model 5"),
        (lambda: tiny(LANDMARK)(torch.zeros(1, 3, dtype=torch.int64), memory=RecurrentMemory(4)), "RecurrentMemory"),
        (lambda: changed(TINY, **HEADS | {"num_layers": 1}), "there is one layer, raise model.num_layers"),
        (lambda: changed(TINY, **HEADS | {"key_offset": 0.0}), "needs model.key_offset"),
        (lambda: changed(TINY, **HEADS | {"induction_heads": 5}), "must be at most the 4 heads"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(use, message):
    with pytest.raises(UserError, match=message):
        use()


# ---- the loss of a large vocabulary in parts, by the kernel, interpreted, and without it, against cross-entropy


@pytest.fixture(params=["by the kernel", "without it"])
def way(request, monkeypatch):
    monkeypatch.setattr(parts, "HAS_TRITON", request.param == "by the kernel")
    monkeypatch.setattr(parts, "AT_ONCE", 200)


@pytest.mark.parametrize("vocabulary", [70, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_all_logits(way, weighted, vocabulary):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(vocabulary, 6, requires_grad=True)
    targets = torch.randint(0, vocabulary, (2, 5))
    targets[0, 2] = targets[1, 4] = NO_LOSS
    weights = torch.rand(2, 5) if weighted else None
    loss, count = parts.head_loss(hidden, weight, targets, weights)
    expected, counted = summed_loss(hidden @ weight.T, targets, weights)
    assert int(count) == int(counted) == 8
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(parts.head_loss(hidden, weight, targets, weights)[0], expected)
    for found, right in zip(*(torch.autograd.grad(x * 0.3, (hidden, weight)) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("sharpness", "few"), [(1, False), (16, True)])
def test_half_precision_rounds_no_more_than_autocast(way, sharpness, few, monkeypatch):
    """Error of the gradients against float64, beside that of the same in one piece; also where few ids have any."""
    torch.manual_seed(0)
    hidden, weight = sharpness * torch.randn(2, 40, 16), torch.randn(300, 16)
    targets = torch.randint(0, 300, (2, 40))
    made, probable = [], parts._few_ids
    monkeypatch.setattr(parts, "_few_ids", lambda *given: made.append(probable(*given)) or made[-1])

    def gradients(loss_of, dtype=torch.float32):
        leaves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = loss_of(*leaves)[0]
        return torch.cat([x.flatten().double() for x in torch.autograd.grad(loss, leaves)])

    def whole(hidden, weight):
        return summed_loss(torch.nn.functional.linear(hidden, weight), targets, None)

    exact = gradients(whole, torch.float64)
    ours = (gradients(lambda *leaves: parts.head_loss(*leaves, targets, None)) - exact).norm()
    assert ours <= 1.2 * (gradients(whole) - exact).norm()
    assert all((len(ids) < 30) == few for _, ids, _ in made)
    assert bool(made) != parts.HAS_TRITON


def test_a_second_backward_pass_is_refused(way):
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(9, 4)
    loss, _ = parts.head_loss(hidden, weight, torch.zeros(1, 3, dtype=torch.int64), None)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()
