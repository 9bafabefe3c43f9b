"""The page in a real Chromium: clicks, keys and searches show the values of the trace."""

import numpy as np
import pytest

from landmark.experiment.inspector.page import render, token_texts
from landmark.experiment.inspector.trace import NO_BLOCK, Trace, trace_retrieval
from landmark.models.huggingface import wrap
from landmark.models.pretrained import Pretrained
from tests.experiment.inspector.conftest import BLOCK, HEADS, LOCAL, TOKENIZER, model_of
from tests.forked import wait_for
from tests.models.huggingface.conftest import make_model, make_tokenizer

W = BLOCK + 1


@pytest.fixture(scope="module")
def trace(tokens) -> Trace:
    return trace_retrieval(model_of(cmt=True), tokens, LOCAL, cutoff=0.1)


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "text.html"
    path.write_text(render(trace, TOKENIZER, "<i>a</i> text", {"run": "one"}), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    wait(browser)
    yield browser
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()], "nothing but the page itself"


def wait(browser, script="return document.body.getAttribute('aria-busy') === 'false'"):
    wait_for(lambda: browser.js(script), 30)


def click_token(browser, position: int, width: int = W) -> None:
    browser.js("document.querySelectorAll('.block')[arguments[0]].scrollIntoView({block: 'center'})", position // width)
    token = f".block:nth-child({position // width + 1}) b:nth-child({position % width + 1})"
    wait(browser, f"return document.querySelector({token!r}) !== null")
    browser.click(token)


def listed(browser, which: str, key: str) -> dict[int, str]:
    """Share by block, or by position, as the panel lists them."""
    script = """return [...document.querySelectorAll(`#${arguments[0]} li`)]
        .map(item => [item.dataset[arguments[1]], item.querySelector('.share').textContent])"""
    return {int(name): share for name, share in browser.js(script, which, key)}


def said(share: float) -> str:
    if share >= 0.0995:
        return f"{int(100 * share + 0.5)} %"
    return f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %" if share > 0 else "0 %"


def shares_of(trace: Trace, position: int, heads=slice(None)) -> dict[int, float]:
    """The weight of each block for a token, mean over heads."""
    blocks, weights = (x.reshape(-1, *x.shape[2:])[heads, :, position] for x in (trace.blocks, rounded(trace)))
    return {int(b): weights[blocks == b].sum() / len(blocks) for b in np.unique(blocks) if b != NO_BLOCK}


def users_of(trace: Trace, block: int) -> dict[int, float]:
    weights = np.where(trace.blocks == block, rounded(trace), 0).sum((0, 1, 2)) / (trace.blocks.shape[0] * HEADS)
    return {int(at): weights[at] for at in np.flatnonzero((trace.blocks == block).any((0, 1, 2)))}


def rounded(trace: Trace) -> np.ndarray:
    return np.rint(trace.weights * np.float64(0xFFFF)) / 0xFFFF


def test_the_page_opens_on_the_token_with_the_most_retrieved_weight_and_text_is_text(opened, trace):
    most = int(rounded(trace).sum((0, 1, 2)).argmax())
    assert opened.js("return [selected, location.hash]") == [most, ""]
    assert listed(opened, "retrieved", "block") == {b: said(share) for b, share in shares_of(trace, most).items()}
    assert opened.texts("h1") == ["<i>a</i> text"]
    rows = opened.js("return [...document.querySelectorAll('.block')].map(row => row.lastChild.textContent)")
    texts = token_texts(TOKENIZER, trace.tokens)
    expected = "".join((text or "·") + ("▪" if at % BLOCK == BLOCK - 1 else "") for at, text in enumerate(texts))
    assert "".join(rows) == expected.replace("\n", "↵")


@pytest.mark.parametrize("position", [60, 71, 85])  # a token, a landmark, one in the last chunk
def test_a_click_shows_what_was_retrieved(opened, trace, position):
    click_token(opened, position)
    expected = shares_of(trace, position)
    assert len(expected) > 3
    assert listed(opened, "retrieved", "block") == {block: said(share) for block, share in expected.items()}
    in_rows = """return Object.fromEntries([...document.querySelectorAll('.block')]
        .map(row => [...row.children].map(part => part.textContent)).filter(([, share]) => share))"""
    assert opened.js(in_rows) == {str(block): said(share) for block, share in expected.items()}
    cells = [float(text.strip("< ")) for text in opened.texts("#by-head td")]
    np.testing.assert_allclose(cells, 100 * trace.weights[..., position].sum(2).flatten(), atol=0.51)
    users = users_of(trace, position // W)
    assert listed(opened, "uses", "position") == {at: said(share) for at, share in sorted(users.items())[:99]}
    retrieved = rounded(trace)[..., position].sum(2).mean()
    dropped = np.where(trace.blocks[:, :, 0, position] == NO_BLOCK, trace.cmt_weights[..., position], 0).mean()
    legend = [f"its chunk {said(1 - retrieved - dropped)}", f"retrieved {said(retrieved)}", f"dropped {said(dropped)}"]
    assert opened.texts("#shares span") == legend
    assert opened.texts("b.selected") == ["▪" if position % W == BLOCK else opened.js("return shown(selected)").strip()]


def test_a_text_without_landmarks(browser, tmp_path):
    wrapped = wrap(make_model("llama"), make_tokenizer(), landmarks="none", block_size=BLOCK, memory={"window": 7})
    trace = trace_retrieval(Pretrained(wrapped), np.frombuffer(b"abcdefghijkl" * 6, np.uint8), LOCAL, k=3)
    path = tmp_path / "text.html"
    path.write_text(render(trace, TOKENIZER, "a text", {}), encoding="utf-8")
    browser.open(path)
    wait(browser)
    click_token(browser, 64, BLOCK)
    expected = shares_of(trace, 64)
    assert len(expected) >= 3
    assert listed(browser, "retrieved", "block") == {block: said(share) for block, share in expected.items()}
    assert browser.texts("b.selected") == ["e"]
    found = "[...document.querySelectorAll('.block')].flatMap((x, n) => x.matches('.local') ? n : [])"
    assert browser.js(f"return {found}") == list(range(trace.visible[64 // BLOCK] // BLOCK, 64 // BLOCK + 1))
    assert browser.errors() == []


def test_heads_are_chosen(opened, trace):
    click_token(opened, 84)
    opened.click("#by-head tr:nth-child(2) td:nth-child(3) button")  # layer 0, head 1
    assert listed(opened, "retrieved", "block") == {b: said(s) for b, s in shares_of(trace, 84, [1]).items()}
    opened.click("#by-head tr:nth-child(3) th button")  # layer 1
    assert listed(opened, "retrieved", "block") == {b: said(s) for b, s in shares_of(trace, 84, [2, 3]).items()}
    opened.click("#by-head tr:nth-child(3) th button")
    assert listed(opened, "retrieved", "block") == {b: said(s) for b, s in shares_of(trace, 84).items()}


def test_keys_and_history_move(opened, trace):
    def selected():
        return opened.js("return [selected, location.hash]")

    click_token(opened, 60)
    for key, at in [("ARROW_RIGHT", 61), ("ARROW_DOWN", 61 + W), ("ARROW_LEFT", 60 + W), ("ARROW_UP", 60)]:
        press(opened, key)
        assert selected() == [at, f"#{at}"]
    opened.click("#uses li button")
    first = max(users_of(trace, 10).items(), key=lambda item: (item[1], -item[0]))[0]
    assert selected() == [first, f"#{first}"]
    opened.js("history.back()")
    wait(opened, "return selected === 60")
    press(opened, "ENTER")
    strongest = max(shares_of(trace, 60).items(), key=lambda item: item[1])[0]
    assert opened.texts(".flash > :first-child") == [str(strongest)]
    assert selected()[0] == 60


def press(browser, key: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))


def test_search_goes_from_place_to_place(opened, tokens):
    opened.type("header input", "€URO\n")
    places = [at for at in range(len(tokens)) if bytes(tokens[at : at + 6].tolist()) == "€uro".encode()]
    assert len(places) == 2
    position = [at + at // BLOCK for at in places]
    assert opened.js("return selected") == position[0]
    assert opened.texts("output") == ["1 of 2"]
    opened.type("header input", "\n")
    assert opened.js("return selected") == position[1]


def test_32k_tokens(browser, tmp_path):
    """Only visible rows have an element for each token."""
    layers, heads, k, count, block_size = 4, 4, 4, 1 << 15, 50
    rng, length = np.random.default_rng(0), count + count // block_size
    last = np.arange(length) // 255 * 255 // (block_size + 1)  # blocks before each chunk
    blocks = (rng.random((layers, heads, k, length)) * last).astype(np.uint16)
    blocks[..., last < k] = NO_BLOCK
    weights = np.where(
        blocks == NO_BLOCK, 0, rng.dirichlet(np.ones(k + 1), (layers, heads, length))[..., 1:].swapaxes(2, 3)
    )
    chunks = list(range(0, length, 255))
    trace = Trace(
        rng.integers(32, 127, count), block_size, block_size + 1, chunks, chunks, blocks, weights.astype(np.float32),
        None, rng.exponential(3, count - 1).astype(np.float32),
    )  # fmt: skip
    page = tmp_path / "long.html"
    page.write_text(render(trace, TOKENIZER, "32 K", {}), encoding="utf-8")
    browser.open(page)
    wait(browser)
    for position in rng.integers(length // 2, length, 10).tolist():
        click_token(browser, position, block_size + 1)
        expected = shares_of(trace, browser.js("return selected"))
        assert listed(browser, "retrieved", "block").items() <= {b: said(s) for b, s in expected.items()}.items()
    rows, tokens = (
        browser.js("return document.querySelectorAll(arguments[0]).length", x) for x in (".block", "#text b")
    )
    assert rows == -(-length // (block_size + 1))
    assert 0 < tokens < 100 * (block_size + 1)
    assert browser.errors() == []
