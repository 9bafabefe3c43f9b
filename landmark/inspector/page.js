"use strict";

// A stream is the text with a landmark after every `blockSize` tokens; what is numbered are its positions. A block has
// W = blockSize + 1 of them, its landmark last. A head is one of layers × heads. See landmark/inspector/reading.py.
const page = JSON.parse(document.getElementById("described").textContent);
const { layers, heads, k, length, blockSize, tokens } = page;
const W = blockSize + 1, HEADS = layers * heads, BLOCKS = Math.ceil(length / W);
const NONE = 0xffff, UNIT = 0xffff, NATS = 1 << 11, LISTED = 24;

const colours = getComputedStyle(document.documentElement); // the same in the light and the dark
const RETRIEVED = colours.getPropertyValue("--retrieved"), USE = colours.getPropertyValue("--use");

const $ = (selector) => document.querySelector(selector);
const blockOf = (position) => Math.floor(position / W);
const isLandmark = (position) => position % W === blockSize;
const tokenOf = (position) => position - blockOf(position);
const positionOf = (token) => token + Math.floor(token / blockSize);
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

// ---- the text: rows of plain text, which become a span a token only while they can be seen

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡" };

/** Signs for what cannot be seen. */
function visible(text) {
  return text.replace(/[\x00-\x1f\x7f]/g, (letter) => SIGNS[letter] ?? String.fromCharCode(0x2400 + letter.charCodeAt()));
}

/** A token as it is shown; "·" goes on with the character before it. */
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
const seen = new Set(); // blocks of the rows that can be seen

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
        if (isIntersecting) seen.add(target.block), fill(target.block);
        else if (seen.delete(target.block)) target.lastChild.textContent = target.lastChild.textContent;
      }
    },
    { root: $("#text"), rootMargin: "400px 0px" },
  );
  for (const row of rows) watcher.observe(row);
}

/** Spans for the tokens of a row. */
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
  span.className = name;
}

function positionAt(span) {
  const row = span.closest(".block");
  return row.block * W + Array.prototype.indexOf.call(row.lastChild.children, span);
}

// ---- the data

let data = null; // arrays of uint16: blocks and weights [head][k][position], missed [head][position], losses [token − 1]

async function unpack() {
  const packed = atob($("#data").textContent);
  $("#data").remove();
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = packed.charCodeAt(at);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(inflated).arrayBuffer());
  const arrays = {};
  let start = 0;
  for (const [name, size] of Object.entries(page.sizes)) {
    const values = (arrays[name] = new Uint16Array(size));
    for (let at = 0; at < size; at++) values[at] = planes[start + at] | (planes[start + size + at] << 8);
    start += 2 * size;
  }
  return arrays;
}

const chosen = new Array(HEADS).fill(true);
const countChosen = () => chosen.filter(Boolean).length;

/** What a token retrieved: of each head the share, and what the context miss token has and nobody gets; of each block. */
function lookUp(position) {
  const share = new Float64Array(HEADS), nowhere = new Float64Array(HEADS), blocks = new Map();
  for (let head = 0; head < HEADS; head++) {
    if (data.missed && data.blocks[head * k * length + position] === NONE) nowhere[head] = data.missed[head * length + position] / UNIT;
    for (let rank = 0; rank < k; rank++) {
      const at = (head * k + rank) * length + position, block = data.blocks[at];
      if (block === NONE) continue;
      const weight = data.weights[at] / UNIT;
      share[head] += weight;
      if (!blocks.has(block)) blocks.set(block, { block, heads: new Float64Array(HEADS).fill(-1), share: 0 });
      const entry = blocks.get(block);
      entry.heads[head] = weight;
      if (chosen[head]) entry.share += weight / countChosen();
    }
  }
  const ordered = [...blocks.values()].filter((entry) => entry.heads.some((weight, head) => weight >= 0 && chosen[head]));
  return { share, nowhere, blocks: ordered.sort((a, b) => b.share - a.share || b.block - a.block) };
}

/** The later tokens that retrieved a block: a scan, which takes milliseconds and nothing that must be kept. */
function findUsers(block) {
  const shares = new Float64Array(length), is = new Uint8Array(length), { blocks, weights } = data, unit = UNIT * countChosen();
  for (let head = 0; head < HEADS; head++) {
    if (!chosen[head]) continue;
    for (let rank = 0; rank < k; rank++) {
      const start = (head * k + rank) * length;
      for (let at = (block + 1) * W; at < length; at++)
        if (blocks[start + at] === block) (shares[at] += weights[start + at] / unit), (is[at] = 1);
    }
  }
  const positions = [];
  for (let at = 0; at < length; at++) if (is[at]) positions.push(at);
  positions.sort((a, b) => shares[b] - shares[a] || a - b);
  return { shares, positions, largest: positions.length ? shares[positions[0]] || 1 : 1 };
}

// ---- what is selected

let selected = null, looked = null, users = null, showsSurprise = false, local = [];

function select(position, { scroll = true, record = "push" } = {}) {
  if (data === null || !(position >= 0 && position < length)) return;
  selected = position;
  if (record && location.hash !== `#${position}`) history[`${record}State`](null, "", `#${position}`);
  show();
  if (scroll) rows[blockOf(position)].scrollIntoView({ block: "nearest" });
}

function show() {
  const before = [...(looked?.blocks.map((entry) => entry.block) ?? []), ...local];
  looked = lookUp(selected);
  users = findUsers(blockOf(selected));
  for (const block of before) clear(rows[block]);
  const largest = looked.blocks[0]?.share || 1;
  for (const { block, share } of looked.blocks) {
    rows[block].style.setProperty("--share", 0.06 + 0.94 * (share / largest));
    rows[block].children[1].textContent = percent(share);
  }
  local = visibleWithoutRetrieval(selected);
  for (const block of local) rows[block].classList.add("local");
  for (const block of seen) fill(block);
  showToken(), showHeads(), showRetrieved(), showUsers(), drawMap();
}

function clear(row) {
  row.style.removeProperty("--share");
  row.children[1].textContent = "";
  row.classList.remove("local", "flash");
}

/** Blocks of its chunk, and of what was incomplete before that. */
function visibleWithoutRetrieval(position) {
  const chunk = page.chunks.findLast((start) => start <= position), blocks = [];
  for (let block = blockOf(chunk); block <= blockOf(position); block++) blocks.push(block);
  return blocks;
}

const quoted = (position) => (isLandmark(position) ? "▪" : shown(position).replaceAll(" ", "␣"));

function showToken() {
  const token = tokenOf(selected), block = blockOf(selected), mark = isLandmark(selected);
  const title = mark ? [`Landmark of block ${number(block)}`] : ["Token ", element("code", { textContent: `‘${quoted(selected)}’` })];
  $("#token h2").replaceChildren(...title);
  const expected = (which) => percent(Math.exp(-data.losses[which - 1] / NATS));
  const said = mark ? [] : [`number ${number(token)}, in block ${number(block)}`];
  if (!mark && token > 0) said.push(`expected with ${expected(token)}`);
  if (!mark && token + 1 < tokens.length) said.push(`the next, ‘${quoted(positionOf(token + 1))}’, with ${expected(token + 1)}`);
  if (mark) said.push("it looks blocks up as tokens do; what it finds goes into its key in the layers above");
  $("#said").textContent = `${said.join("; ")}.`;
  const mean = (values) => values.reduce((sum, value, head) => sum + (chosen[head] ? value : 0), 0) / countChosen();
  const retrieved = mean(looked.share), nowhere = mean(looked.nowhere);
  const parts = [["chunk", "its chunk", 1 - retrieved - nowhere], ["retrieved", "retrieved", retrieved]];
  if (data.missed) parts.push(["nowhere", "nowhere", nowhere]);
  const bar = parts.map(([className, , share]) => {
    const part = element("i", { className });
    part.style.flex = Math.max(0, share);
    return part;
  });
  const legend = parts.map(([className, name, share]) => element("span", {}, element("i", { className }), `${name} ${percent(share)}`));
  $("#shares").replaceChildren(element("div", {}, ...bar), ...legend);
  $("#shares").hidden = false;
}

function showHeads() {
  const table = $("#by-head table");
  if (!table.rows.length) buildHeads(table);
  table.querySelectorAll("td button").forEach((cell, head) => {
    cell.textContent = percent(looked.share[head]).replace(" %", "");
    cell.style.setProperty("--share", looked.share[head]);
    cell.setAttribute("aria-pressed", chosen[head]);
  });
  $("#by-head").hidden = false;
}

function buildHeads(table) {
  const top = table.insertRow();
  const choice = (label, ...which) => {
    const button = element("button", { type: "button", textContent: label, onclick: () => choose(which) });
    return button;
  };
  const range = (count) => Array.from({ length: count }, (_, at) => at);
  top.append(element("th"), ...range(heads).map((head) => element("th", {}, choice(head, ...range(layers).map((layer) => layer * heads + head)))));
  top.title = "heads";
  for (const layer of range(layers)) {
    const row = table.insertRow(), of = range(heads).map((head) => layer * heads + head);
    row.append(element("th", {}, choice(`layer ${layer}`, ...of)));
    row.append(...of.map((head) => element("td", { title: `layer ${layer}, head ${head % heads}: share of the attention that is retrieved` }, choice("", head))));
  }
}

/** Only these heads; all of them, where these were the ones. */
function choose(which) {
  const same = chosen.every((is, head) => is === which.includes(head));
  for (let head = 0; head < HEADS; head++) chosen[head] = same || which.includes(head);
  show();
}

/** A picture of the heads that a share comes from; −1 for those that did not choose the block. */
function heatMap(weights, colour) {
  const size = HEADS > 64 ? 3 : 7, canvas = element("canvas", { width: heads * size, height: layers * size });
  const context = canvas.getContext("2d"), names = [];
  weights.forEach((weight, head) => {
    if (weight < 0) return;
    const layer = Math.floor(head / heads);
    names.push(`layer ${layer}, head ${head % heads}: ${percent(weight)}`);
    context.fillStyle = `rgba(${colour}, ${0.15 + 0.85 * weight})`;
    context.fillRect((head % heads) * size, layer * size, size, size);
  });
  canvas.title = names.join("\n");
  return canvas;
}

function item(weights, colour, share, about, text, onclick) {
  const button = element("button", { type: "button", onclick }, heatMap(weights, colour));
  button.append(element("span", { className: "share", textContent: percent(share) }), element("small", { textContent: about }), element("code", {}, ...text));
  return element("li", {}, button);
}

const counted = (count, one) => `${number(count)} ${one}${count === 1 ? "" : "s"}`;

function showRetrieved() {
  const { blocks } = looked, token = tokenOf(selected);
  const heading = blocks.length ? `${counted(blocks.length, "block")} retrieved for it` : "No block retrieved for it";
  $("#retrieved h2").textContent = heading + (blocks.length > LISTED ? `, the first ${LISTED}` : "");
  const items = blocks.slice(0, LISTED).map(({ block, heads: weights, share }) => {
    const about = `block ${number(block)}, ${counted(token - block * blockSize, "token")} before`;
    const made = item(weights, RETRIEVED, share, about, [textOf(block * W, end(block))], () => visit(block));
    made.dataset.block = block;
    return made;
  });
  $("#retrieved ol").replaceChildren(...items);
  $("#retrieved").hidden = false;
}

function showUsers() {
  const block = blockOf(selected), { positions, shares } = users;
  const whole = (block + 1) * W <= length;
  const by = positions.length ? `retrieved later by ${counted(positions.length, "token")}` : whole ? "not retrieved later" : "not complete yet";
  $("#uses h2").textContent = `Block ${number(block)}: ${by}` + (positions.length > LISTED ? `, the first ${LISTED}` : "");
  const items = positions.slice(0, LISTED).map((position) => {
    const about = isLandmark(position) ? `landmark of block ${number(blockOf(position))}` : `token ${number(tokenOf(position))}`;
    const text = [textOf(position - 30, position), element("mark", { textContent: shown(position) }), textOf(position + 1, position + 12)];
    const made = item(headsThatRead(block, position), USE, shares[position], about, text, () => select(position));
    made.dataset.position = position;
    return made;
  });
  $("#uses ol").replaceChildren(...items);
  $("#uses").hidden = false;
}

function headsThatRead(block, position) {
  const weights = new Float64Array(HEADS).fill(-1);
  for (let head = 0; head < HEADS; head++)
    for (let rank = 0; rank < k; rank++) {
      const at = (head * k + rank) * length + position;
      if (data.blocks[at] === block) weights[head] = data.weights[at] / UNIT;
    }
  return weights;
}

/** Show a block; the token stays selected. */
function visit(block) {
  document.querySelectorAll(".flash").forEach((row) => row.classList.remove("flash"));
  rows[block].classList.add("flash");
  rows[block].scrollIntoView({ block: "center" });
}

// ---- the whole text at a glance

function drawMap() {
  const canvas = $("#map"), { clientWidth: width, clientHeight: height } = canvas, scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  if (selected === null) return;
  const y = (position) => (position / length) * height, thick = Math.max(2, y(W));
  context.fillStyle = "rgba(128, 128, 128, .35)";
  const first = local[0] * W;
  context.fillRect(0, y(first), width, Math.max(2, y(selected + 1) - y(first)));
  const largest = looked.blocks[0]?.share || 1;
  for (const { block, share } of [...looked.blocks].reverse()) {
    context.fillStyle = `rgba(${RETRIEVED}, ${0.2 + 0.8 * (share / largest)})`;
    context.fillRect(0, y(block * W), width * 0.55, thick);
  }
  const peaks = new Float64Array(Math.ceil(height) + 1);
  for (const position of users.positions) peaks[Math.round(y(position))] = Math.max(peaks[Math.round(y(position))], users.shares[position] || 1e-9);
  peaks.forEach((peak, at) => {
    if (peak === 0) return;
    context.fillStyle = `rgba(${USE}, ${0.2 + 0.8 * (peak / users.largest)})`;
    context.fillRect(width * 0.6, at, width * 0.4, 1.5);
  });
  context.fillStyle = getComputedStyle(document.body).color;
  context.fillRect(0, y(selected) - 1, width, 2);
}

// ---- search

const found = { query: "", positions: [], marks: null };

function search(step) {
  const query = $("header input").value;
  if (query !== found.query) {
    Object.assign(found, { query, positions: [], marks: null });
    if (query) findAll(query);
    for (const block of seen) fill(block);
    if (found.positions.length === 0) return ($("output").textContent = query ? "not found" : "");
    step = 0;
  }
  if (found.positions.length === 0) return;
  const next = found.positions.findIndex((position) => position >= (selected ?? 0));
  let at = next < 0 ? 0 : next;
  if (step > 0 && found.positions[at] === selected) at += 1;
  if (step < 0) at = (next < 0 ? found.positions.length : next) - 1;
  at = (at + found.positions.length) % found.positions.length;
  $("output").textContent = `${number(at + 1)} of ${number(found.positions.length)}`;
  select(found.positions[at]);
}

function findAll(query) {
  const starts = new Uint32Array(tokens.length + 1);
  tokens.forEach((text, token) => (starts[token + 1] = starts[token] + text.length));
  const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/ /g, "\\s+"), "giu");
  found.marks = new Uint8Array(length);
  let token = 0;
  for (const { index, 0: text } of tokens.join("").matchAll(pattern)) {
    while (starts[token + 1] <= index) token++;
    found.positions.push(positionOf(token));
    for (let at = token; at < tokens.length && starts[at] < index + text.length; at++) found.marks[positionOf(at)] = 1;
  }
}

// ---- what is done with it

function listen() {
  $("#text").addEventListener("click", ({ target }) => {
    if (target.matches("b")) select(positionAt(target), { scroll: false });
  });
  $("#map").addEventListener("click", ({ offsetY, target }) => {
    rows[Math.min(BLOCKS - 1, Math.floor((offsetY / target.clientHeight) * (length / W)))].scrollIntoView({ block: "center" });
  });
  $("form").addEventListener("submit", (event) => (event.preventDefault(), search(1)));
  $("#surprise").addEventListener("change", ({ target }) => {
    showsSurprise = target.checked;
    for (const block of seen) fill(block);
  });
  $("#theme").addEventListener("click", () => {
    const { style } = document.documentElement, preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    style.colorScheme = (style.colorScheme || preferred) === "dark" ? "light" : "dark";
    drawMap();
  });
  $("#all").addEventListener("click", () => (chosen.fill(true), show()));
  addEventListener("popstate", () => selectByAddress(null));
  addEventListener("resize", drawMap);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input[type=search]")) return void (event.key === "Escape" && $("#text").focus());
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -W, ArrowDown: W };
    if (event.key in steps && selected !== null) {
      event.preventDefault();
      select(Math.min(length - 1, Math.max(0, selected + steps[event.key])), { record: "replace" });
    } else if (event.key === "/") {
      event.preventDefault();
      $("header input").focus();
    } else if (event.key === "n" || event.key === "N") search(event.key === "n" ? 1 : -1);
    else if (event.key === "Enter" && event.target.matches("#text, body") && looked?.blocks.length) visit(looked.blocks[0].block);
  });
}

function selectByAddress(record) {
  if (/^#\d+$/.test(location.hash)) select(Number(location.hash.slice(1)), { record });
}

$("h1").textContent = page.title;
$("#settings").textContent = Object.entries(page.settings).map(([name, value]) => `${name}: ${value}`).join(" · ");
buildText();
performance.mark("text");
addEventListener("DOMContentLoaded", async () => {
  try {
    data = await unpack();
  } catch (error) {
    $("#said").textContent = `The data of this page cannot be read: ${error}`;
    throw error;
  }
  listen();
  document.body.setAttribute("aria-busy", "false");
  performance.mark("ready");
  selectByAddress("replace");
});
