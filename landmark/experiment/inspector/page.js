// ---- search

const found = { query: "", positions: [], marks: null };

function search(step) {
  const query = $("header input").value;
  if (query !== found.query) {
    Object.assign(found, { query, positions: [], marks: null });
    if (query) findAll(query);
    for (const block of visibleBlocks) fill(block);
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

// ---- events

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
    for (const block of visibleBlocks) fill(block);
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
    else if (event.key === "Enter" && event.target.matches("#text, body") && retrieved?.blocks.length) visit(retrieved.blocks[0].block);
  });
}

function selectByAddress(record) {
  if (/^#\d+$/.test(location.hash)) select(Number(location.hash.slice(1)), { record });
}

/** The token whose heads give the most weight to retrieved blocks; 0 if nothing is retrieved. */
function mostRetrieved() {
  const sums = new Float64Array(length);
  for (let at = 0; at < data.weights.length; at++) sums[at % length] += data.weights[at];
  return sums.reduce((best, sum, at) => (sum > sums[best] ? at : best), 0);
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
  if (selected === null) select(mostRetrieved(), { record: null });
});
