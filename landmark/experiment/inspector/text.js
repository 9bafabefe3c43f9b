"use strict";

// A stream is the text with a landmark after every `blockSize` tokens, if the model has any. Positions count its tokens
// and landmarks. A block has W = blockSize + 1 positions, its landmark last; without landmarks W = blockSize. A head is
// one of layers × heads. See landmark/experiment/inspector/trace.py.
const page = JSON.parse(document.getElementById("content").textContent);
const { layers, heads, k, length, blockSize, width: W, tokens } = page;
const HEADS = layers * heads, BLOCKS = Math.ceil(length / W);
const NO_BLOCK = 0xffff, UNIT = 0xffff, NATS = 1 << 11, LISTED = 24;

const colours = getComputedStyle(document.documentElement); // the same in the light and the dark theme
const RETRIEVED = colours.getPropertyValue("--retrieved"), USE = colours.getPropertyValue("--use");

const $ = (selector) => document.querySelector(selector);
const blockOf = (position) => Math.floor(position / W);
const isLandmark = (position) => position % W === blockSize;
const tokenOf = (position) => position - (W - blockSize) * blockOf(position);
const positionOf = (token) => token + (W - blockSize) * Math.floor(token / blockSize);
const number = (value) => value.toLocaleString("en");

function percent(share) {
  if (share >= 0.0995) return `${Math.round(100 * share)} %`;
  return share >= 0.0005 ? `${(100 * share).toFixed(1)} %` : share > 0 ? "< 0.1 %" : "0 %";
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// ---- the text: a row of plain text for each block; only visible rows have an element for each token

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡" };

/** The text with a sign for each invisible character. */
function visible(text) {
  return text.replace(/[\x00-\x1f\x7f]/g, (letter) => SIGNS[letter] ?? String.fromCharCode(0x2400 + letter.charCodeAt()));
}

/** The text shown for a position; "·" for a token that continues the character before it. */
function shown(position) {
  return isLandmark(position) ? "▪" : visible(tokens[tokenOf(position)] || "·");
}

function textOf(first, stop) {
  let text = "";
  for (let at = Math.max(0, first); at < Math.min(stop, length); at++) if (!isLandmark(at)) text += tokens[tokenOf(at)] || "·";
  return visible(text);
}

const end = (block) => Math.min((block + 1) * W, length);
const rows = [];
const visibleBlocks = new Set();

function buildText() {
  const all = document.createDocumentFragment();
  for (let block = 0; block < BLOCKS; block++) {
    const text = textOf(block * W, end(block)) + (isLandmark(end(block) - 1) ? "▪" : "");
    const row = element("div", { className: "block" }, element("span", { textContent: block }), element("span"), element("span", { textContent: text }));
    row.block = block;
    rows.push(row);
    all.append(row);
  }
  $("#text").append(all);
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) visibleBlocks.add(target.block), fill(target.block);
        else if (visibleBlocks.delete(target.block)) target.lastChild.textContent = target.lastChild.textContent;
      }
    },
    { root: $("#text"), rootMargin: "200px 0px" },
  );
  for (const row of rows) watcher.observe(row);
}

/** Make and colour the elements of the tokens of a row. */
function fill(block) {
  const text = rows[block].lastChild;
  if (text.childElementCount === 0) {
    const spans = [];
    for (let at = block * W; at < end(block); at++) spans.push(element("b", { textContent: shown(at) }));
    text.replaceChildren(...spans);
  }
  for (let at = block * W, span = text.firstChild; span; at++, span = span.nextSibling) paint(span, at);
}

function paint(span, position) {
  const use = users === null ? 0 : users.shares[position];
  const nats = showsSurprise && !isLandmark(position) && position > 0 && data ? data.losses[tokenOf(position) - 1] / NATS : 0;
  let name = isLandmark(position) ? "mark" : "";
  if (use > 0) name += " use", span.style.setProperty("--alpha", 0.06 + 0.64 * (use / users.largest));
  if (nats > 0) name += " surprise", span.style.setProperty("--nats", Math.min(1, nats / 8));
  if (found.marks?.[position]) name += " found";
  if (position === selected) name += " selected";
  if (span.className !== name) span.className = name;
}

function positionAt(span) {
  const row = span.closest(".block");
  return row.block * W + Array.prototype.indexOf.call(row.lastChild.children, span);
}
