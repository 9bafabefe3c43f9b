// ---- the selected token

let selected = null, retrieved = null, users = null, showsSurprise = false, local = [];

function select(position, { scroll = true, record = "push" } = {}) {
  if (data === null || !(position >= 0 && position < length)) return;
  selected = position;
  if (record && location.hash !== `#${position}`) history[`${record}State`](null, "", `#${position}`);
  show();
  if (scroll) rows[blockOf(position)].scrollIntoView({ block: "nearest" });
}

function show() {
  const before = [...(retrieved?.blocks.map((entry) => entry.block) ?? []), ...local];
  retrieved = lookUp(selected);
  users = findUsers(blockOf(selected));
  for (const block of before) clear(rows[block]);
  const largest = retrieved.blocks[0]?.share || 1;
  for (const { block, share } of retrieved.blocks) {
    rows[block].style.setProperty("--share", 0.06 + 0.94 * (share / largest));
    rows[block].children[1].textContent = percent(share);
  }
  local = visibleWithoutRetrieval(selected);
  for (const block of local) rows[block].classList.add("local");
  for (const block of visibleBlocks) fill(block);
  showToken(), showHeads(), showRetrieved(), showUsers(), drawMap();
}

function clear(row) {
  row.style.removeProperty("--share");
  row.children[1].textContent = "";
  row.classList.remove("local", "flash");
}

/** The blocks of its chunk, and those before the chunk that it sees without retrieval. */
function visibleWithoutRetrieval(position) {
  const chunk = page.chunks.findLastIndex((start) => start <= position), blocks = [];
  for (let block = blockOf(page.visible[chunk]); block <= blockOf(position); block++) blocks.push(block);
  return blocks;
}

const quoted = (position) => (isLandmark(position) ? "▪" : shown(position).replaceAll(" ", "␣"));

function showToken() {
  const token = tokenOf(selected), block = blockOf(selected), mark = isLandmark(selected);
  const title = mark ? [`Landmark of block ${number(block)}`] : ["Token ", element("code", { textContent: `‘${quoted(selected)}’` })];
  $("#token h2").replaceChildren(...title);
  const expected = (which) => percent(Math.exp(-data.losses[which - 1] / NATS));
  const facts = mark ? [] : [`number ${number(token)}, in block ${number(block)}`];
  if (!mark && token > 0) facts.push(`expected with ${expected(token)}`);
  if (!mark && token + 1 < tokens.length) facts.push(`the next, ‘${quoted(positionOf(token + 1))}’, with ${expected(token + 1)}`);
  if (mark) facts.push("it retrieves blocks as tokens do; in higher layers its key depends on them");
  $("#said").textContent = `${facts.join("; ")}.`;
  const mean = (values) => values.reduce((sum, value, head) => sum + (chosen[head] ? value : 0), 0) / countChosen();
  const ofBlocks = mean(retrieved.share), dropped = mean(retrieved.dropped);
  const parts = [["chunk", "its chunk", 1 - ofBlocks - dropped], ["retrieved", "retrieved", ofBlocks]];
  if (data.cmt_weights) parts.push(["dropped", "dropped", dropped]);
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
    cell.textContent = percent(retrieved.share[head]).replace(" %", "");
    cell.style.setProperty("--share", retrieved.share[head]);
    cell.setAttribute("aria-pressed", chosen[head]);
  });
  $("#by-head").hidden = false;
}

function buildHeads(table) {
  const top = table.insertRow();
  const choice = (label, ...which) => element("button", { type: "button", textContent: label, onclick: () => choose(which) });
  const range = (count) => Array.from({ length: count }, (_, at) => at);
  top.append(element("th"), ...range(heads).map((head) => element("th", {}, choice(head, ...range(layers).map((layer) => layer * heads + head)))));
  top.title = "heads";
  for (const layer of range(layers)) {
    const row = table.insertRow(), of = range(heads).map((head) => layer * heads + head);
    row.append(element("th", {}, choice(`layer ${layer}`, ...of)));
    row.append(...of.map((head) => element("td", { title: `layer ${layer}, head ${head % heads}: share of the attention that is retrieved` }, choice("", head))));
  }
}

/** Choose these heads alone; if they are chosen already, choose all heads. */
function choose(which) {
  const same = chosen.every((isChosen, head) => isChosen === which.includes(head));
  for (let head = 0; head < HEADS; head++) chosen[head] = same || which.includes(head);
  show();
}

/** A picture of the weight that each head gives a block; −1 for heads that do not retrieve it. */
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
  const { blocks } = retrieved, token = tokenOf(selected);
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
    const { heads: weights } = lookUp(position).blocks.find((entry) => entry.block === block);
    const made = item(weights, USE, shares[position], about, text, () => select(position));
    made.dataset.position = position;
    return made;
  });
  $("#uses ol").replaceChildren(...items);
  $("#uses").hidden = false;
}

/** Scroll to a block; the selected token stays. */
function visit(block) {
  document.querySelectorAll(".flash").forEach((row) => row.classList.remove("flash"));
  rows[block].classList.add("flash");
  rows[block].scrollIntoView({ block: "center" });
}

// ---- the map of the whole text

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
  const largest = retrieved.blocks[0]?.share || 1;
  for (const { block, share } of [...retrieved.blocks].reverse()) {
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
